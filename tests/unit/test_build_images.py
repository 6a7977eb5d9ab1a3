"""Which image a name means: OCI layouts made by hand, no network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aenv_build.bases.image import ImageSource, ResolvedImage, make_image_tree
from aenv_build.bases.skopeo import failure
from aenv_build.language.image_reference import parse_image
from aenv_run.errors import AenvError, BaseUnavailable, NoSpace
from aenv_run.types import Architecture
from tests.cases.image_layers import file, folder, shown
from tests.images import INDEX, MANIFEST, Layout, Pointer, attestation, on

AMD64, ARM64 = Architecture("amd64"), Architecture("arm64")
PIN = "sha256:" + "0" * 64


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


async def resolve(layout: Layout, name: str = "oci:layout", architecture: Architecture = AMD64) -> ResolvedImage:
    source = ImageSource(parse_image(name).at(layout.folder.parent), layout.folder.parent / "kept")
    return await source.resolve(architecture)


@pytest.mark.parametrize(
    ("text", "place", "tag", "pin", "host"),
    [
        ("docker://debian", "debian", "latest", None, "docker.io"),
        ("docker://library/debian:12", "library/debian", "12", None, "docker.io"),
        ("docker://registry.example:5000/a/b:t", "registry.example:5000/a/b", "t", None, "registry.example:5000"),
        ("docker://localhost/a", "localhost/a", "latest", None, "localhost"),
        (f"docker://r.example/a@{PIN}", "r.example/a", None, PIN, "r.example"),
        (f"docker://r.example/a:12@{PIN}", "r.example/a", None, PIN, "r.example"),
        ("oci:./layout", "./layout", None, None, None),
        ("oci:/abs/layout:name", "/abs/layout", "name", None, None),
        ("docker-archive:./x.tar", "./x.tar", None, None, None),
        ("docker-archive:x.tar:debian:12", "x.tar", "debian:12", None, None),
    ],
)
def test_names(text: str, place: str, tag: str | None, pin: str | None, host: str | None) -> None:
    found = parse_image(text)
    assert (found.place, found.tag, found.pin) == (place, tag, pin)
    assert host is None or found.host == host


@pytest.mark.parametrize(
    "text",
    ["debian", "docker:debian", "docker://", "docker://A b", "docker://x:", "docker://-x", "docker://x@sha256:1",
     "docker://x@sha512:" + "0" * 128, "docker://x/../y", "oci:", "containers-storage:x", "dir:/x", "oci:a\nb"],
)  # fmt: skip
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"image|tag|digest"):
        parse_image(text)


async def test_the_config_is_kept(layout: Layout) -> None:
    config = {
        "Env": ["PATH=/opt/bin:/bin", "EMPTY=", "A=1", "A=2=3", "none"],
        "WorkingDir": "srv/../app",
        "User": "app:staff",
        "Entrypoint": ["/entry", "a b"],
        "Cmd": ["serve"],
        "ExposedPorts": {"80/tcp": {}, "443/tcp": {}},
        "Labels": {"org.example.team": "x", "aenv.sandbox": "forged", "aenv.template.start": "evil"},
    }
    pointer = layout.name(None, layout.image([file("a")], config=config))
    image = await resolve(layout)
    assert image.context.env == {"PATH": "/opt/bin:/bin", "EMPTY": "", "A": "2=3"}
    assert (image.context.workdir, image.context.user) == ("/app", "app:staff")
    assert image.labels == {
        "org.example.team": "x",
        "aenv.image.entrypoint": '["/entry", "a b"]',
        "aenv.image.cmd": '["serve"]',
        "aenv.image.exposed-ports": "443/tcp,80/tcp",
        "aenv.image.digest": pointer["digest"],
    }
    assert image.manifest_digest == pointer["digest"]


async def test_no_config_is_root_in_the_root(layout: Layout) -> None:
    layout.name(None, layout.image([file("a")]))
    context = (await resolve(layout)).context
    assert (context.env, context.workdir, context.user) == ({}, "/", "root")


async def test_the_index_is_asked_for_this_architecture(layout: Layout) -> None:
    """Attestations are no images; of several versions of an architecture the least is taken; indexes may nest."""
    plain, newer = layout.image([file("plain")]), layout.image([file("v3")])
    arm = layout.image([file("arm")], architecture="arm64")
    inner = layout.index(
        attestation(layout.image([file("a")])), on(newer, "amd64", variant="v3"), on(plain, "amd64"),
        on(arm, "arm64", variant="v8"), on(plain, "amd64", os="windows"),
    )  # fmt: skip
    layout.name("nested", layout.index(inner))
    layout.name("plain", inner)
    assert (await resolve(layout, "oci:layout:nested")).manifest_digest == plain["digest"]
    assert (await resolve(layout, "oci:layout:plain", ARM64)).manifest_digest == arm["digest"]


async def test_an_absent_architecture_lists_those_that_exist(layout: Layout) -> None:
    arm = layout.image([file("a")], architecture="arm64")
    index = layout.index(
        on(arm, "arm64", variant="v8"), on(arm, "s390x"), attestation(layout.image([file("a")], architecture="x"))
    )
    layout.name("index", index)
    layout.name("single", arm)
    with pytest.raises(
        BaseUnavailable, match=r"nothing for linux/amd64; it has linux/arm64/v8, linux/s390x\n"
    ) as told:
        await resolve(layout, "oci:layout:index")
    assert "name an image that has it" in told.value.fix
    with pytest.raises(BaseUnavailable, match=r"nothing for linux/amd64; it has linux/arm64\n"):
        await resolve(layout, "oci:layout:single")


async def test_a_layout_of_several_images_wants_a_name(layout: Layout) -> None:
    one = layout.name("one", layout.image([file("1")]))
    layout.name("two", layout.image([file("2")]))
    assert (await resolve(layout, "oci:layout:one")).manifest_digest == one["digest"]
    for name in ("oci:layout", "oci:layout:three"):
        with pytest.raises(BaseUnavailable) as told:
            await resolve(layout, name)
        assert "one, two" in told.value.fix


def replaced(layout: Layout, pointer: Pointer, data: bytes) -> None:
    (layout.folder / "blobs" / "sha256" / pointer["digest"].hex).write_bytes(data)


async def test_documents_that_lie(layout: Layout) -> None:
    good = layout.image([file("a")])
    blob = json.loads((layout.folder / "blobs/sha256" / good["digest"].hex).read_bytes())
    cases = {
        "both": ({**blob, "manifests": []}, "no known form"),
        "neither": ({"schemaVersion": 2}, "no known form"),
        "old": ({"schemaVersion": 1, "layers": []}, "schema version 1"),
        "chart": (
            {**blob, "config": layout.document({"name": "chart"}, "application/x")},
            "config is damaged or not",
        ),
        "count": ({**blob, "layers": blob["layers"] * 2}, "2 layers, and its config names 1"),
        "digest": ({**blob, "config": {**blob["config"], "digest": "sha256:../../x"}}, "manifest is damaged"),
        "absent": ({**blob, "config": {**blob["config"], "digest": PIN}}, "No such file"),
        "loop": ({"schemaVersion": 2, "manifests": [good] * 5000}, "manifest is damaged"),
    }
    for name, (value, _) in cases.items():
        layout.name(name, layout.document(value, MANIFEST))
    layout.name("labels", layout.image([file("a")], config={"Labels": {"a": "x" * (1 << 20)}}))
    layout.name("text", layout.put(b"{", MANIFEST))
    nested = good
    for _ in range(5):
        nested = layout.index(nested)
    layout.name("deep", nested)
    altered = layout.name("altered", layout.document({**blob, "x": 1}, INDEX))
    replaced(layout, altered, b"{}")
    reasons = {name: reason for name, (_, reason) in cases.items()}
    reasons |= {"labels": "more than 512 KiB"}
    reasons |= {
        "text": "manifest is damaged",
        "deep": "nested deeper",
        "altered": "sent a document with the digest",
    }
    for name, reason in reasons.items():
        with pytest.raises(BaseUnavailable, match=reason):
            await resolve(layout, f"oci:layout:{name}")


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
async def test_the_tree_of_a_layout_and_a_layer_that_was_altered(layout: Layout, tmp_path: Path) -> None:
    lower, upper = [folder("d"), file("d/a", "1")], [file("d/.wh.a"), file("b", "2")]
    layout.name(None, layout.image(lower, upper, config={"WorkingDir": "/w"}))
    image = await resolve(layout)
    await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree", disk_mib=64)
    assert shown(tmp_path / "tree") == {"b": "f:2", "d": "d", "w": "d"}
    path = layout.folder / "blobs/sha256" / image.layers[0].digest.hex
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        BaseUnavailable, match=f"oci:layout: layer .*: its content is sha256:.*, not {image.layers[0].digest}"
    ):
        await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree2", disk_mib=64)
    path.unlink()
    with pytest.raises(BaseUnavailable, match=f"lacks its layer {image.layers[0].digest}"):
        await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree3", disk_mib=64)


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking a root file system needs root")
async def test_layers_that_cannot_fit_are_not_fetched(layout: Layout, tmp_path: Path) -> None:
    pointer = layout.image([file("a")])
    manifest = json.loads((layout.folder / "blobs/sha256" / pointer["digest"].hex).read_bytes())
    manifest["layers"][0]["size"] = 1 << 50
    layout.name(None, layout.document(manifest, MANIFEST))
    image = await resolve(layout)
    with pytest.raises(BaseUnavailable, match="far more than fits on the machine's disk of 64 MiB"):
        await make_image_tree(image, tmp_path / "scratch", tmp_path / "tree", disk_mib=64)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("reading manifest 404 in r.example/x: unauthorized: authentication required", "(401)"),
        ("reading manifest 1 in r.example/x: manifest unknown: manifest unknown", "(404)"),
        (
            "fetching blob: (tuning data: total 404 @1098.429 ms, last retry 401 @0.403 ms): unexpected EOF",
            "broke off",
        ),
        ("fetching blob: received unexpected HTTP status: 403", "(403)"),
        ("invalid status code from registry 404 (Not Found)", "(404)"),
        ("unexpected status from GET request to https://r.example/v2/404: 502 Bad Gateway", "broke off"),
        ("Requesting bearer token: StatusCode: 429, slow down", "(429)"),
        ("toomanyrequests: You have reached your pull rate limit", "(429)"),
        ("dial tcp: lookup r.example: no such host", "cannot be reached"),
        ("writing blob: write /x: no space left on device", "disk is full"),
        ("something new", "skopeo says: something new"),
    ],
)
def test_what_skopeo_says_is_typed(said: str, why: str) -> None:
    error = failure(parse_image("docker://r.example/x"), f'time="t" level=fatal msg="{said}"\n')
    told = error if isinstance(error, AenvError) else error.error  # type: ignore[attr-defined]
    assert why in told.message and "docker://r.example/x" in told.message and told.fix
    assert isinstance(told, NoSpace if "disk is full" in why else BaseUnavailable)
