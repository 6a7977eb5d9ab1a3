"""Dockerfiles as recipes: a table of files and the steps that become of them, and of what is refused where."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from aenv_build.dockerfile.copies import BuildContext
from aenv_build.dockerfile.recipe_text import recipe_text
from aenv_build.dockerfile.source import read
from aenv_build.dockerfile.translate import Options, Translation, translate
from aenv_build.language.load import load
from aenv_build.language.verbs import Copy
from aenv_run.errors import RecipeError

SH = ["/bin/sh", "-c"]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A folder with files to copy."""
    for name in ("a.txt", "b.txt", "c.md", "app/main.py", "app/test.pyc", ".hidden.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    with tarfile.open(tmp_path / "files.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    (tmp_path / "zeros").write_bytes(bytes(4096))
    tarfile.open(tmp_path / "empty.tar", "w").close()
    (tmp_path / "small.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    (tmp_path / "[x]").write_text("x")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    return tmp_path


def translated(context: Path, text: str, **options: object) -> Translation:
    """Of a Dockerfile in the context; the recipe is also written, and read as every recipe is."""
    (context / "Dockerfile").write_text(text)
    file = read(text.encode(), "Dockerfile")
    place = BuildContext.of(context, context / "Dockerfile", context, file)
    found = translate(file, place, Options(name="made", start=False, **options))  # type: ignore[arg-type]
    (context / "recipe.yaml").write_text(recipe_text(found.recipe, "made"))
    load(context / "recipe.yaml")
    return found


def steps(found: Translation) -> list[object]:
    """Without the ids of steps, which the recipe's own order says."""
    listed = found.recipe.get("steps", [])
    assert isinstance(listed, list)
    return [{key: value for key, value in step.items() if key not in {"id", "needs"}} for step in listed]


def run(*words: str, **more: object) -> dict[str, object]:
    return {"run": {"command": list(words), **more}}


FROM = "FROM debian:12\n"
TABLE: Mapping[str, tuple[str, list[object]]] = {
    "run by the shell": ("RUN make && make install", [run(*SH, "make && make install")]),
    "run a list": ('RUN ["make", "all"]', [run("make", "all")]),
    "what is no list is for the shell": ('RUN [ -f x ]', [run(*SH, "[ -f x ]")]),
    "continued, with a comment between": ("RUN a \\\n# why\n\n  b \\  \n  && c", [run(*SH, "a   b   && c")]),
    "two escapes end a line": ("RUN a \\\\\nRUN b \\\\ \\\n c", [run(*SH, "a \\\\"), run(*SH, "b \\\\  c")]),
    "an old env with a tab": ("ENV A\tb  c", [{"env": {"A": "b  c"}}]),
    "text that is a template to us, with a carriage return": ("RUN echo '{{a\rb'", [run(*SH, "echo '{{a\rb'")]),
    "add of what is no archive": (
        "ADD zeros empty.tar /srv/", [{"copy": {"from": ["zeros", "empty.tar"], "to": "/srv/", "user": "root"}}],
    ),
    "copy by Go's patterns": (
        "COPY [^ab].* [[]x] [!c].md /srv/",
        [{"copy": {"from": ["c.md", "[x]", "c.md"], "to": "/srv/", "user": "root"}}],
    ),
    "another escape": ("RUN a `\n b", [run(*SH, "a  b")]),
    "a document is the script": ("RUN <<EOF\nset -e\necho $X\nEOF", [run(*SH, "set -e\necho $X\n")]),
    "a document for a program": (
        "RUN python3 <<'EOF' > /out\nprint(1)\nEOF",
        [run(*SH, "python3 <<'EOF' > /out\nprint(1)\nEOF")],
    ),
    "tabs of a document": ("RUN <<-EOF\n\techo\n\tEOF\nUSER a", [run(*SH, "echo\n"), {"user": "a"}]),
    "shell": (
        'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN a | b',
        [run("/bin/bash", "-o", "pipefail", "-c", "a | b")],
    ),
    "arguments are variables of commands": (
        "ARG V=1 W\nRUN echo $V\nENV V=2\nRUN echo $V",
        [run(*SH, "echo $V", env={"V": "1"}), {"env": {"V": "2"}}, run(*SH, "echo $V")],
    ),
    "env in its forms": (
        "ENV A=1 B='x y' C=\"q $A\"\nENV OLD some text\nENV E=$A-${NO:-d}${A:+p}",
        [
            {"env": {"A": "1", "B": "x y", "C": "q ${A}"}, "expand": True},
            {"env": {"OLD": "some text"}},
            {"env": {"E": "1-${NO:-d}p"}, "expand": True},
        ],
    ),
    "quotes in a default, parameters of a shell": (
        "ARG N\nENV N=\nENV A=${N:-\"x } y\"}${N:-'z'} B=a$$b$1c$@",
        [{"env": {"N": ""}}, {"env": {"A": "x } yz", "B": "abc"}}],
    ),
    "a pattern that matches nothing": (
        "COPY a.txt yarn.lock* /srv/\nCOPY none* /x",
        [{"copy": {"from": "a.txt", "to": "/srv/", "user": "root"}}],
    ),
    "a document of any name": ("COPY <<1 /x\nb\n1", [{"write": {"to": "/x", "content": "b\n", "user": "root"}}]),
    "the image's own path": ("ENV PATH=/opt/\\$x:$PATH", [{"env": {"PATH": "/opt/$$x:${PATH}"}, "expand": True}]),
    "a quoted dollar": ("ENV A='$B' C=\\$D", [{"env": {"A": "$B", "C": "$D"}}]),
    "workdir, relative too": (
        "WORKDIR /srv\nWORKDIR app\nWORKDIR /srv",
        [
            {"mkdir": {"path": "/srv", "user": "root"}}, {"workdir": "/srv"},
            {"mkdir": {"path": "/srv/app", "user": "root"}}, {"workdir": "/srv/app"}, {"workdir": "/srv"},
        ],
    ),
    "user with variables": ("ARG U=1000\nUSER ${U}:50", [{"user": "1000:50"}]),
    "copy": ("COPY a.txt /srv/", [{"copy": {"from": "a.txt", "to": "/srv/", "user": "root"}}]),
    "copy to the workdir": (
        "WORKDIR /srv\nCOPY a.txt .\nCOPY app sub",
        [
            {"mkdir": {"path": "/srv", "user": "root"}}, {"workdir": "/srv"},
            {"copy": {"from": "a.txt", "to": "/srv/", "user": "root"}},
            {"copy": {"from": "app", "to": "/srv/sub", "user": "root"}},
        ],
    ),
    "copy with owner and mode": (
        "COPY --chown=app:staff --chmod=0750 --link a.txt /x",
        [{"copy": {"from": "a.txt", "to": "/x", "user": "app:staff", "mode": "0750"}}],
    ),
    "copy by a pattern": (
        "COPY *.txt /srv/", [{"copy": {"from": [".hidden.txt", "a.txt", "b.txt"], "to": "/srv/", "user": "root"}}],
    ),
    "copy a list with spaces": (
        'COPY ["a.txt", "b.txt", "/srv/my files/"]',
        [{"copy": {"from": ["a.txt", "b.txt"], "to": "/srv/my files/", "user": "root"}}],
    ),
    "copy documents": (
        "ARG N=5\nCOPY --chmod=755 <<EOF <<'RAW' /etc/\nn = $N \"q\"\nEOF\n$N\nRAW",
        [
            {"write": {"to": "/etc/EOF", "content": 'n = 5 "q"\n', "user": "root", "mode": "755"}},
            {"write": {"to": "/etc/RAW", "content": "$N\n", "user": "root", "mode": "755"}},
        ],
    ),
    "a document has quotes and escapes": (
        "ARG N=5\nCOPY <<EOF /x\n" + r'''say \"hi\" "$N" \$N \\ \n it''' + "\nEOF",
        [{"write": {"to": "/x", "content": r'''say "hi" "5" $N \ n it''' + "\n", "user": "root"}}],
    ),
    "add unpacks": (
        "ADD files.tar.gz c.md /srv/",
        [
            {"copy": {"from": "files.tar.gz", "to": "/srv", "unpack": True, "user": "root"}},
            {"copy": {"from": "c.md", "to": "/srv/", "user": "root"}},
        ],
    ),
    "mounts": (
        "RUN --mount=type=cache,target=/root/.cache,id=Pip/x --mount=type=secret,id=TOKEN make",
        [run(*SH, "make") | {"cache": [{"path": "/root/.cache", "id": "pip-x"}], "secrets": ["TOKEN"]}],
    ),
    "a template's signs are text": ("RUN echo '{{ x }}' {% y {#", [run(*SH, "echo '{{ x }}' {% y {#")]),
    "nothing of metadata": ("EXPOSE 80\nLABEL a=b\nVOLUME /x\nSTOPSIGNAL 9\nHEALTHCHECK NONE\nMAINTAINER me", []),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_steps(context: Path, case: str) -> None:
    text, expected = TABLE[case]
    head = "# escape=`\n" if case == "another escape" else "# syntax=docker/dockerfile:1\n"
    found = translated(context, head + FROM + text)
    assert steps(found) == expected
    loaded = load(context / "recipe.yaml").recipe.steps  # and the file says the same as the value
    ran = [list(step.run.command) for step in loaded if step.run is not None]
    assert ran == [step["run"]["command"] for step in expected if isinstance(step, dict) and "run" in step]


def test_a_script_with_an_interpreter_of_its_own_is_run_as_a_file(context: Path) -> None:
    found = translated(context, FROM + "RUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF\n")
    (only,) = load(context / "recipe.yaml").recipe.steps
    assert only.run is not None and only.run.command[-1] == "#!/usr/bin/env python3\nprint(1)\n"
    assert "mktemp" in str(steps(found)[0])


def test_stages_that_the_target_does_not_need_are_left_out(context: Path) -> None:
    text = (
        "ARG V=12\nFROM golang:1 AS build\nWORKDIR /src\nRUN go build\n"
        "FROM build AS unused\nRUN never\n"
        "FROM debian:$V\nCOPY --from=build /out/app /usr/local/bin/\nCOPY --from=alpine:3 /etc/os-release /r\n"
    )
    recipe = translated(context, text).recipe
    assert recipe["base"] == {"image": "docker://debian:12"}
    loaded = load(context / "recipe.yaml").recipe
    shown = [(step.id, step.needs, step.verb) for step in loaded.steps]
    assert shown == [
        ("from-2", None, "base"), ("line-3", ("from-2",), "mkdir"), ("line-3.2", None, "workdir"),
        ("line-4", None, "run"), ("line-8", (), "copy"), ("from-9", None, "base"), ("line-9", ("line-8",), "copy"),
    ]  # fmt: skip
    copies = [step.copy_ for step in loaded.steps if step.copy_ is not None]
    assert [getattr(copy.from_, "step", None) for copy in copies if isinstance(copy, Copy)] == ["line-4", "from-9"]
    assert loaded.outputs[0].from_ == "line-9"


def test_a_stage_on_a_stage_goes_on_where_that_ended(context: Path) -> None:
    text = (
        "FROM debian:12 AS base\nENV A=1\nRUN one\nFROM base AS left\nRUN left\n"
        "FROM base\nCOPY --from=left /x /y\nRUN echo $A\n"
    )
    translated(context, text)
    loaded = load(context / "recipe.yaml").recipe
    assert [(step.id, step.needs) for step in loaded.steps] == [
        ("line-2", ()), ("line-3", None), ("line-5", ("line-3",)), ("line-7", ("line-3",)), ("line-8", None),
    ]  # fmt: skip
    inherits = translated(context, "FROM x AS b\nARG V=1\nFROM b\nRUN echo $V\n")
    assert steps(inherits) == [run(*SH, "echo $V", env={"V": "1"})]
    only = translated(context, text, target="left").recipe
    assert only["outputs"] == [{"tags": ["latest"], "from": "line-5"}]


def test_scratch_arguments_and_images_of_other_names(context: Path) -> None:
    text = "ARG IMG\nFROM ${IMG:-x} AS b\nFROM scratch\nARG TARGETARCH\nCOPY --from=b /$TARGETARCH /bin/\n"
    given = {"arguments": {"IMG": "mine"}, "images": {"mine": "snapshot:tiny:1"}}
    recipe = translated(context, text, **given).recipe
    listed = recipe["steps"]
    assert isinstance(listed, list)
    assert recipe["base"] == {"empty": True} and listed[0]["base"] == {"snapshot": "tiny:1"}
    assert listed[1]["copy"]["from"]["path"] in {"/amd64", "/arm64"}


def test_what_a_container_would_run_is_started_and_noted(context: Path) -> None:
    text = FROM + 'EXPOSE 80 53/udp\nLABEL team="a b"\nENTRYPOINT ["serve"]\nCMD ["--port", "80"]\n'
    file = read(text.encode(), "Dockerfile")
    place = BuildContext.of(context, context / "Dockerfile", context, file)
    recipe = translate(file, place, Options(name="made")).recipe
    assert recipe["steps"] == [
        {
            "id": "line-5",
            "needs": [],
            "start": {"command": ["serve", "--port", "80"]},
            "ready": {"command": "sleep 20"},
        }
    ]
    (output,) = recipe["outputs"]  # type: ignore[misc]
    assert output["labels"] == {
        "team": "a b", "aenv.image.entrypoint": '["serve"]', "aenv.image.cmd": '["--port", "80"]',
        "aenv.image.exposed-ports": "53/udp,80/tcp",
    }  # fmt: skip
    shell = translate(
        read((FROM + "ENTRYPOINT top -b\nCMD x").encode(), "D"), place, Options("m", ready={"port": 1})
    )
    assert shell.recipe["steps"][0]["start"] == {"command": [*SH, "top -b"]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('FROM x\nCMD ["a"]\nENTRYPOINT ["e"]\n', ["e", "a"]),
        ('FROM x AS b\nCMD ["a"]\nFROM b\nENTRYPOINT ["e"]\n', ["e"]),
        ('FROM x AS b\nENTRYPOINT ["e"]\nFROM b\nCMD ["a"]\n', ["e", "a"]),
        ('FROM x AS b\nSHELL ["/bin/ash", "-c"]\nFROM b\nCMD a\n', ["/bin/ash", "-c", "a"]),
    ],
)
def test_what_stages_leave_to_each_other(context: Path, text: str, words: list[str]) -> None:
    place = BuildContext.of(context, context / "Dockerfile", context, read(text.encode(), "D"))
    recipe = translate(read(text.encode(), "D"), place, Options(name="made")).recipe
    assert recipe["steps"][-1]["start"]["command"] == words  # type: ignore[index]


def test_rules_of_dockerignore_count(context: Path) -> None:
    (context / ".dockerignore").write_text("*.md\n**/*.pyc\n")
    found = translated(context, FROM + "COPY app /app\n")
    assert steps(found) == [{"copy": {"from": "app", "to": "/app", "user": "root", "ignore": ".dockerignore"}}]
    with pytest.raises(RecipeError, match=r"Dockerfile:2: COPY: nothing in the context is called c\.md"):
        translated(context, FROM + "COPY c.md /x\n")


def test_what_has_no_effect_is_said(context: Path) -> None:
    found = translated(context, FROM + "VOLUME /x\nHEALTHCHECK CMD true\n")
    assert [warning.split(":")[1] for warning in found.warnings] == ["2", "3"]
    mounts = (
        "ARG KNOWN\nRUN --mount=type=secret,id=T,mode=0400,required=false "
        "--mount=type=cache,target=/c,sharing=locked,uid=1 x\n"
    )
    found = translated(context, FROM + mounts, arguments={"KNOWN": "1", "OTHER": "2"})
    first, *others = found.warnings
    assert first == "Dockerfile: --build-arg OTHER: no ARG has that name"
    assert [one.rpartition(" is not used")[0].rpartition(": ")[2] for one in others] == [
        "a secret's mode", "a secret's required=false", "a cache's uid", "a cache's sharing",
    ]  # fmt: skip


REFUSED = {
    "RUN x\n" + FROM: (1, "RUN stands before the first FROM"),
    "": (1, "there is no FROM"),
    "# syntax=example.org/other:1\n" + FROM: (1, "is another language"),
    FROM + "RUM x": (2, "'RUM' is no instruction"),
    FROM + "RUN <<EOF\nx": (2, "the document <<EOF has no end"),
    FROM + "RUN --mount=target=/x make": (2, "a mount of the type bind"),
    FROM + "RUN --mount=type=ssh make": (2, "a mount of the type ssh"),
    FROM + "RUN --mount=type=secret,id=a-b make": (2, "'a-b' is not a secret's name"),
    FROM + "RUN --mount=type=secret,id=T,colour=red make": (2, "type secret has no option 'colour'"),
    FROM + "RUN --mount=type=cache,target=/c,colour=red make": (2, "type cache has no option 'colour'"),
    FROM + "ADD small.tar.zst /x": (2, "compressed with zstd is not unpacked here"),
    FROM + "RUN --network=none make": (2, "--network=none"),
    FROM + "COPY nothing /x": (2, "nothing in the context is called nothing"),
    FROM + "COPY ../../etc/passwd /x": (2, "nothing in the context is called"),
    FROM + "COPY outside /x": (2, "nothing in the context is called outside"),
    FROM + "COPY *.txt /x": (2, "several files go into a directory"),
    FROM + "COPY --parents a.txt /x": (2, "--parents is not understood"),
    FROM + "COPY --chmod=u+x a.txt /x": (2, "octal digits"),
    FROM + "COPY --from=later a.txt /x\nFROM a AS later\nFROM 0": (2, "the stage 'later' stands later"),
    FROM + "FROM x AS b\nFROM x AS b": (3, "two stages are called 'b'"),
    FROM + "ADD https://a.example/x /x": (2, "files are not fetched by it"),
    FROM + "ADD --from=x a.txt /x": (2, "--from is not understood"),
    FROM + "ONBUILD RUN x": (2, "ONBUILD is for images"),
    FROM + "WORKDIR $HOME/x": (2, "the value of a variable is not set"),
    FROM + "ENV A=${B": (2, "the closing brace is missing"),
    FROM + "ENV A='x": (2, "a quote is not closed"),
    FROM + "SHELL bash": (2, "SHELL takes a JSON list"),
    FROM + "LABEL aenv.sandbox=x": (2, "is one of aenv's own"),
    FROM + "USER a b": (2, "'a b' is no user"),
    "FROM --platform=linux/s390x x": (1, "is not this machine's"),
    "FROM $NO": (1, "is empty"),
    "FROM UPPER/Case:x": (1, "is not an image"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_at_its_line(context: Path, text: str) -> None:
    line, said = REFUSED[text]
    options = {"target": "0"} if "later" in text else {}
    with pytest.raises(RecipeError) as refused:
        translated(context, text, **options)
    assert refused.value.message.startswith(f"Dockerfile:{line}: ") and said in refused.value.message


def test_the_text_is_yaml_with_nothing_lost() -> None:
    recipe = {"a": "x\ny {{ z }}", "b": ["0640", "{%"], "c": {"d": True, "e": "no"}}
    read_back = yaml.safe_load(recipe_text(recipe, "of\ntwo lines"))
    assert read_back == {"a": "x\ny {{ '{{' }} z }}", "b": ["0640", "{{ '{%' }}"], "c": {"d": True, "e": "no"}}
