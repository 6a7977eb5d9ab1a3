"""A build's steps as a recipe, and archives of a COPY as what goes to its target: tables."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from aenv_build.language.load import load
from aenv_run.api.templates.archives import Packed, repack
from aenv_run.api.templates.records import Build
from aenv_run.api.templates.steps import From, RecipeWriter
from aenv_run.api.wire.templates import BuildAsked
from aenv_run.errors import InvalidInput, TooLarge
from aenv_run.types import Name, Tag
from aenv_run.untar import Limit

BUILD = Build(
    build_id="0" * 8 + "-0000-0000-0000-" + "0" * 12, template=Name("made"), tags=(Tag("latest"),), cpus=2,
    memory_mib=512, disk_mib=1024, created_at_s=1, updated_at_s=1,
)  # fmt: skip
IMAGE = From({"image": "docker://debian:12"})


def written(tmp_path: Path, steps: list[dict[str, object]], begin: From = IMAGE, **more: object) -> list[object]:
    """The recipe's steps, each without its id; the recipe is also read as aenv-build reads it."""
    asked = BuildAsked.model_validate({"fromImage": "debian:12", "steps": steps, **more})
    (tmp_path / "f").write_text("x")
    packed = {number: Packed(tmp_path / "f", is_file=True) for number in range(1, 9)}
    text = RecipeWriter(BUILD, begin, packed, internet=False, memory=True).recipe(asked)
    (tmp_path / "recipe.yaml").write_text(text)
    load(tmp_path / "recipe.yaml")
    recipe = json.loads(text)
    return [{key: value for key, value in step.items() if key != "id"} for step in recipe["steps"]]


def step(type: str, *args: str, **more: object) -> dict[str, object]:
    return {"type": type, "args": list(args), **more}


def test_each_type_of_step(tmp_path: Path) -> None:
    steps = [
        step("RUN", "make {{ x }}"), step("run", "id", "app"),
        step("ENV", "A", "1", "PATH", "/x:$PATH", "P", "5$"),
        step("WORKDIR", "/srv"), step("USER", "1000:50"),
        step("COPY", "a.txt", "dst/", "app", "0644", filesHash="0" * 64),
        step("ARG", "V", "1"), step("EXPOSE", "80"), step("LABEL", "k", "v"), step("RUN", "b"),
    ]  # fmt: skip
    made = written(tmp_path, steps)
    assert made[0]["run"]["command"][-1] == "make {{ '{{' }} x }}"  # type: ignore[index]
    assert made[1]["run"]["user"] == "app"  # type: ignore[index]
    assert made[2] == {"env": {"A": "1", "PATH": "/x:$PATH", "P": "5$$"}, "expand": True}
    assert made[3:6] == [{"mkdir": "/srv"}, {"workdir": "/srv"}, {"user": "1000:50"}]
    assert made[6] == {"copy": {"from": str(tmp_path / "f"), "to": "dst/", "user": "app", "mode": "0644"}}
    assert made[7]["run"]["env"] == {"V": "1"}  # type: ignore[index]
    recipe = load(tmp_path / "recipe.yaml").recipe
    assert recipe.steps[0].run is not None and recipe.steps[0].run.command[-1] == "make {{ x }}"
    assert recipe.outputs[0].labels == {"k": "v"} and recipe.outputs[0].memory


def test_a_user_by_name_is_made_and_what_is_started_is_waited_for(tmp_path: Path) -> None:
    made = written(tmp_path, [step("USER", "dev")], startCmd="serve")
    assert made[0]["run"]["command"][-1] == "dev" and made[0]["run"]["user"] == "root"  # type: ignore[index]
    assert made[1] == {"user": "dev"}
    assert made[2]["start"]["command"][-1] == "serve"  # type: ignore[index]
    assert made[2]["ready"]["command"][-1] == "sleep 20"  # type: ignore[index]
    recipe = load(tmp_path / "recipe.yaml").recipe
    assert recipe.outputs[0].labels == {"aenv.template.start": "serve"}
    begin = From({"image": "docker://x"}, start="old", ready="is up")
    (only,) = written(tmp_path, [], begin)
    assert only["start"]["command"][-1] == "old" and only["ready"]["command"][-1] == "is up"  # type: ignore[index]


@pytest.mark.parametrize(
    "odd", ["\x7f\x85", "a\u2028b\u2029", "\ufeff\uffff", "\U0001f600", "tab\t\x07\r\n end", "{% {{ {#"]
)
def test_any_text_comes_through(tmp_path: Path, odd: str) -> None:
    written(tmp_path, [step("RUN", odd), step("ENV", odd.replace("=", ""), odd)])
    ran, env = load(tmp_path / "recipe.yaml").recipe.steps
    assert ran.run is not None and ran.run.command[-1] == odd
    assert env.env == {odd: odd}


def test_what_is_forced_is_run_anew_from_there_on(tmp_path: Path) -> None:
    made = written(
        tmp_path, [step("RUN", "a"), step("ENV", "A", "1", force=True), step("RUN", "b"), step("RUN", "c")]
    )
    assert ["salt" in one for one in made] == [False, False, True, False]  # type: ignore[operator]
    made = written(tmp_path, [step("RUN", "a"), step("ENV", "A", "1", force=True)], startCmd="serve")
    assert ["salt" in one for one in made] == [False, False, True]  # type: ignore[operator]


def test_what_has_no_effect_is_noted(tmp_path: Path) -> None:
    asked = BuildAsked.model_validate({"steps": [step("RUN", "a"), step("expose", "80"), step("VOLUME", "/x")]})
    writer = RecipeWriter(BUILD, IMAGE, {}, internet=False, memory=True)
    writer.recipe(asked)
    assert [(number, note.split()[0]) for number, note in writer.notes] == [("2", "EXPOSE"), ("3", "VOLUME")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (step("FLY"), "no step of the type"), (step("RUN"), "RUN takes a command"), (step("ENV", "A"), "in turn"),
        (step("WORKDIR", "../x"), "'..'"),
        (step("LABEL", "aenv.sandbox", "x"), "one of aenv's own"),
        (step("RUN", "a", filesHash="0" * 64), "takes no files"),
        (step("USER", "a b"), "is not a user"), (step("ENV", "", "x"), "not a name"),
        (step("COPY", "a", "/b", "", "u+x", filesHash="0" * 64), "not a file mode"),
        (step("COPY", "a", "/b", "", "", "x", filesHash="0" * 64), "a user and a mode"),
    ],
)  # fmt: skip
def test_a_wrong_step_is_named(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match="step 2: ") as refused:
        written(tmp_path, [step("RUN", "ok"), wrong])
    assert said in refused.value.message


LIMIT = Limit(1 << 20, "the disk")


def archive(tmp_path: Path, *names: str, packed: bool = True) -> Path:
    """``d/`` is a directory, ``l@`` a link, ``h=x`` another name of x, ``!`` a device; all else a file."""
    with tarfile.open(fileobj=(raw := io.BytesIO()), mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name.rstrip("/@!").partition("=")[0])
            member.mode = 0o755 if name.endswith(("/", ".sh")) else 0o600
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            elif name.endswith("@"):
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            elif name.endswith("!"):
                member.type = tarfile.BLKTYPE
            elif "=" in name:
                member.type, member.linkname = tarfile.LNKTYPE, name.partition("=")[2]
            else:
                member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()) if member.isreg() else None)
    path = tmp_path / "archive"
    path.write_bytes(gzip.compress(raw.getvalue()) if packed else raw.getvalue())
    return path


def content(packed: Packed) -> object:
    """The name of a plain file, or the names in the tar."""
    if packed.is_file:
        return packed.path.name
    with tarfile.open(packed.path) as tar:
        return [member.name for member in tar]


@pytest.mark.parametrize(
    ("names", "source", "expected"),
    [
        (["a.txt"], "a.txt", "a.txt"),
        (["dir/a.txt"], "./dir/a.txt", "a.txt"),
        (["app/", "app/m.py", "app/sub/", "app/sub/x"], "app", ["m.py", "sub", "sub/x"]),
        (["app/m.py"], "app/", ["m.py"]),
        (["a.txt", "app/", "app/m.py"], ".", ["a.txt", "app", "app/m.py"]),
        (["a.txt", "b.txt", "c.md"], "*.txt", ["a.txt", "b.txt"]),
        (["a.txt", "c.md"], "*.txt", "a.txt"),
        (["x/1/f", "x/2/g"], "x/*", ["f", "g"]),
        (["l@"], "l", ["l"]),
        (["app/", "app/a", "app/h=app/a", "app/l@"], "app", ["a", "h", "l"]),
        (["app/"], "app", []),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_what_a_copy_takes(tmp_path: Path, names: list[str], source: str, expected: object, packed: bool) -> None:
    found = repack(archive(tmp_path, *names, packed=packed), source, tmp_path / "out", LIMIT)
    assert content(found) == expected
    again = repack(tmp_path / "archive", source, tmp_path / "out2", LIMIT)
    assert found.path.read_bytes() == again.path.read_bytes(), "or the cache would not know it again"


@pytest.mark.parametrize(
    ("names", "source", "said"),
    [
        (["../x"], "x", "outside of the context"), (["/etc/x"], "etc", "outside of the context"),
        (["dev!"], "dev", "no file, directory or link"), (["a"], "b", "nothing of that name"),
        (["a"], "../a", "leads out"), (["x", "app/a", "app/h=x"], "app", "a link to what is not copied"),
    ],
)  # fmt: skip
def test_what_is_refused_of_an_archive(tmp_path: Path, names: list[str], source: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        repack(archive(tmp_path, *names), source, tmp_path / "out", LIMIT)


def test_no_archive_and_one_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"no tar at all, and long enough to be read as one" * 40)
    with pytest.raises(InvalidInput, match="is refused"):
        repack(tmp_path / "archive", "x", tmp_path / "out", LIMIT)
    good = archive(tmp_path, "x").read_bytes()
    for damaged in (good[:10] + b"\xff" * 50 + good[60:], b"\x1f\x8b" + bytes(600)):  # its data, and its head
        (tmp_path / "archive").write_bytes(damaged)
        with pytest.raises(InvalidInput, match="is refused"):
            repack(tmp_path / "archive", "x", tmp_path / "out", LIMIT)
    with tarfile.open(tmp_path / "archive", "w:gz") as tar:  # a few bytes that unpack to far more
        member = tarfile.TarInfo("zeros")
        member.size = 2 << 20
        tar.addfile(member, io.BytesIO(bytes(2 << 20)))
    with pytest.raises(TooLarge):
        repack(tmp_path / "archive", "zeros", tmp_path / "out2", LIMIT)
