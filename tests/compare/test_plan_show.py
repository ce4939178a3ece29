"""Plans as files, and `thinwire plan show`: table, picture, figures, and files that are none."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from thinwire import parse
from thinwire.compressors import Compressor
from thinwire.plan import LayerRow, PlanRecord, sent_bytes
from thinwire.plan.record import layer_rows, printable
from thinwire_tools import cli

SHAPES = {
    "net.embed.weight": (4000, 64),
    "net.0.up.weight": (256, 64),
    "net.0.norm.weight": (64,),
    "net.0.down.weight": (64, 256),
    "net.1.up.weight": (256, 64),
}
BUCKETS = [["net.1.up.weight", "net.0.down.weight"], ["net.0.norm.weight", "net.0.up.weight"], ["net.embed.weight"]]
REFERENCE = "ef(topk(density=0.01))"
CHOSEN = {
    "net.embed.weight": "ef(topk(density=0.001))",
    "net.0.up.weight": "ef(topk(density=0.02))",
    "net.0.down.weight": REFERENCE,
    "net.1.up.weight": "ef(topk(density=0.005))",
}
ERRORS = {"net.embed.weight": 1.0, "net.0.up.weight": 6.0, "net.0.down.weight": 2.0, "net.1.up.weight": 1.0}


def record(
    chosen: dict[str, str] | None = None,
    reference: str = REFERENCE,
    *,
    num_ranks: int = 4,
    errors: Mapping[str, float] = ERRORS,
    reference_errors: Mapping[str, float] = dict.fromkeys(ERRORS, 4.0),
    step: int = 500,
    policy: str = "lgreco(every=100)",
    note: str = "",
) -> PlanRecord:
    chosen = CHOSEN if chosen is None else chosen
    plan = {name: parse(chosen.get(name, "raw")) for name in SHAPES}
    rules = {name: parse(reference if name in CHOSEN else "raw") for name in SHAPES}
    rows = layer_rows(plan, rules, SHAPES, BUCKETS, num_ranks, errors, reference_errors)
    return PlanRecord(rows, num_ranks, step, policy, printable(note))


def of_rules(plan: dict[str, Compressor], buckets: Sequence[Sequence[str]] = (), note: str = "") -> PlanRecord:
    rows = layer_rows(plan, {}, dict.fromkeys(plan, (64, 64)), buckets, 2, {}, {})
    return PlanRecord(rows, 2, 3, "", note)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "plan.json"
    record().write(found)
    return found


def shown(capsys, monkeypatch, *args: object, columns: int = 120) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["plan", "show", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_a_record_is_in_the_order_of_communication() -> None:
    rows = record().rows
    assert [row.name for row in rows] == [name for names in BUCKETS for name in names]
    assert [row.bucket for row in rows] == [0, 0, 1, 1, 2]
    embed = rows[-1]
    assert (embed.shape, embed.numel, embed.compressor) == ((4000, 64), 256_000, "ef(topk(density=0.001))")
    assert embed.sent_bytes == sent_bytes(parse(embed.compressor), embed.shape, 4)
    assert embed.reference_bytes == sent_bytes(parse(REFERENCE), embed.shape, 4)
    assert (embed.error, embed.reference_error) == (1.0, 4.0)
    assert rows[2].error is None
    assert record().sent_bytes == sum(row.sent_bytes for row in rows)


def test_layers_of_no_bucket_come_last() -> None:
    plan = {name: parse(REFERENCE) for name in ("a", "b", "c")}
    shapes = dict.fromkeys(plan, (64, 64))
    found = layer_rows(plan, {}, shapes, [["b", "unknown"]], 1, {"a": float("nan")}, {})
    assert [(row.name, row.bucket) for row in found] == [("b", 0), ("a", 1), ("c", 1)]
    assert found[0].sent_bytes == found[0].reference_bytes > 0, "a world of one is taken for one of two"
    assert found[1].error is None
    assert printable("two\nlines") == "two lines"
    assert {row.bucket for row in layer_rows(plan, {}, shapes, [], 2, {}, {})} == {0}


def test_a_record_survives_its_file(path: Path) -> None:
    assert PlanRecord.read(path) == record()
    assert json.loads(path.read_text())["thinwire_plan"] == 1


def edited(path: Path, edit) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps(edit(found) or found))


def of_layer(**values):
    return lambda found: found["layers"][1].update(values)


HOSTILE = {
    "a list": (lambda found: [found], "JSON object"),
    "another format": (lambda found: found.update(thinwire_plan=2), "format is '2'"),
    "a true format": (lambda found: found.update(thinwire_plan=True), "format is"),
    "no step": (lambda found: found.pop("step") and None, "has no step"),
    "more keys": (lambda found: found.update(code="x"), "what no plan has"),
    "no layers": (lambda found: found.update(layers=[]), "at least one"),
    "layers by name": (lambda found: found.update(layers={}), "must be a list"),
    "a layer that is none": (lambda found: found["layers"].append(3), "must be an object"),
    "a layer without shape": (lambda found: found["layers"][1].pop("shape") and None, "has no shape"),
    "a layer of more": (of_layer(run="x"), "what no plan has"),
    "no ranks": (lambda found: found.update(num_ranks=0), "num_ranks must be"),
    "many ranks": (lambda found: found.update(num_ranks=10**9), "num_ranks must be"),
    "half a step": (lambda found: found.update(step=1.5), "step must be"),
    "a policy that is none": (lambda found: found.update(policy=3), "policy must be printable"),
    "a note to the terminal": (lambda found: found.update(note="\x1b[2J"), "note must be printable"),
    "an endless note": (lambda found: found.update(note="x" * 100_000), "too long"),
    "a name that is none": (of_layer(name=["x"]), "name must be printable"),
    "no name": (of_layer(name=""), "has no name"),
    "a name to the terminal": (of_layer(name="\x1b]0;x\x07"), "name must be printable"),
    "a layer twice": (of_layer(name="net.1.up.weight"), "there twice"),
    "no shape": (of_layer(shape="64"), "shape must be a list"),
    "a shape of floats": (of_layer(shape=[64.0, 256]), "whole numbers"),
    "a shape of truths": (of_layer(shape=[True]), "whole numbers"),
    "a negative shape": (of_layer(shape=[64, -256]), "not negative"),
    "a huge shape": (of_layer(shape=[2**40, 2**40]), "no layer has a shape"),
    "a huge shape of nothing": (of_layer(shape=[0, 10**30]), "no layer has a shape"),
    "endless dimensions": (of_layer(shape=[1] * 100_000), "no layer has a shape"),
    "a bucket before": (lambda found: found["layers"][-1].update(bucket=0), "comes after bucket"),
    "a negative bucket": (of_layer(bucket=-1), "bucket must be"),
    "a bucket of text": (of_layer(bucket="0"), "bucket must be"),
    "an unknown compressor": (of_layer(compressor="zip(level=9)"), "no compressor is called 'zip'"),
    "a reference that is none": (of_layer(reference="topk(density=7)"), "density must be above 0"),
    "a compressor of another type": (of_layer(compressor="topk(density='a')"), "is not a spec"),
    "a compressor that is none": (of_layer(compressor=None), "a spec must be printable"),
    "code": (of_layer(compressor="__import__('os').system('true')"), "is not a spec"),
    "an endless spec": (of_layer(compressor="ef(" * 5000), "too long"),
    "a deep spec": (of_layer(compressor="(" * 1900), "is not a spec"),
    "negative bytes": (of_layer(sent_bytes=-1.0), "sent_bytes must be a finite number"),
    "bytes of text": (of_layer(reference_bytes="many"), "reference_bytes must be"),
    "true bytes": (of_layer(sent_bytes=True), "sent_bytes must be"),
    "no bytes": (of_layer(sent_bytes=None), "sent_bytes must be"),
    "huge bytes": (of_layer(sent_bytes=10**400), "sent_bytes must be"),
    "a negative error": (of_layer(error=-0.5), "error must be"),
    "an error of text": (of_layer(reference_error="0"), "reference_error must be"),
    "an endless error": (of_layer(error=float("inf")), "Infinity is no number"),
    "an error that is none": (of_layer(error=float("nan")), "NaN is no number"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_are_no_plans_say_why(what: str, path: Path, capsys) -> None:
    edit, message = HOSTILE[what]
    edited(path, edit)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        PlanRecord.read(path)
    assert "is not a plan that wire.plan_record().write() wrote" in str(error.value)
    assert len(str(error.value)) < 5000
    assert cli.main(["plan", "show", str(path)]) == 64
    assert "\x1b]0" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not text"),
        (b"import os", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"thinwire_plan": ' + b"9" * 5000 + b"}", "is not a plan"),
        (b'{"thinwire_plan": ' + b"[" * 900 + b"]" * 900 + b"}", "format is"),
    ],
)
def test_files_that_are_no_json(content: bytes, message: str, tmp_path: Path) -> None:
    found = tmp_path / "plan.json"
    found.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PlanRecord.read(found)


def test_a_file_of_any_size_is_not_read(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("thinwire.plan.record.MOST_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="larger than"):
        PlanRecord.read(path)


def test_records_are_checked_when_they_are_made() -> None:
    row = record().rows[0]
    with pytest.raises(ValueError, match="sent_bytes"):
        dataclasses.replace(row, sent_bytes=float("nan"))
    with pytest.raises(ValueError, match="whole numbers"):
        LayerRow(**{**dataclasses.asdict(row), "shape": [64, 64]})


def test_the_table_has_every_layer_in_its_order(path: Path, capsys, monkeypatch) -> None:
    out = shown(capsys, monkeypatch, path)
    places = [out.index(name) for names in BUCKETS for name in names]
    assert places == sorted(places)
    embed = next(line for line in out.splitlines() if "net.embed.weight" in line)
    share = (
        100 * parse("topk(density=0.001)").wire_bytes((4000, 64)) / parse("topk(density=0.01)").wire_bytes((4000, 64))
    )
    assert embed.split() == ["2", "net.embed.weight", "4000x64", "1.02", CHOSEN["net.embed.weight"], *embed.split()[5:]]
    assert embed.split()[6:] == [f"{share:.1f}", "10.0"]
    assert "5 layers in 3 buckets, 4 ranks, step 500" in out
    assert "chosen by lgreco(every=100)" in out
    assert f"Reference: {REFERENCE}" in out
    assert "Error (sum of the layers' L2 norms) 5.864: 73.3 % of the reference's 8, within the budget." in out
    ratio = record().reference_bytes / record().sent_bytes
    assert f"{ratio:.2f}x fewer bytes" in out


@pytest.mark.parametrize("columns", [30, 60, 80, 100, 300])
def test_the_table_fits_any_terminal(columns: int, path: Path, capsys, monkeypatch) -> None:
    out = shown(capsys, monkeypatch, path, columns=columns)
    table = out.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= columns
    assert ("4000x64" in table) == (columns >= 118)
    if columns >= 60:
        assert "10.0" in table


def test_long_plans_are_shown_whole(tmp_path: Path, capsys, monkeypatch) -> None:
    plan = {f"layers.{i}.weight": parse("minmax(bits=4)") for i in range(500)}
    of_rules(plan, [list(plan)], "kept [bold]all[/]").write(tmp_path / "plan.json")
    out = shown(capsys, monkeypatch, tmp_path / "plan.json")
    assert all(f" {name} " in out for name in plan)
    assert "as many bytes" in out
    assert "No errors were taken" in out
    assert "kept [bold]all[/]" in out
    assert "Plan: the rules' own" in out


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("lgreco(alpha=0.5)", "146.6 % of what the policy allows 4, over the budget"),
        ("kmeans(alpha=2.0)", "36.6 % of what the policy allows 16, within"),
        ("lgreco(error='squared')", "Error (L2 norm) 3.162: 79.1 % of the reference's 4, within"),
        ("lgreco(error='squared', alpha=2.0)", "39.5 % of what the policy allows 8, within"),
        ("something(of=others)", "73.3 % of the reference's 8"),
    ],
)
def test_the_budget_is_that_of_the_policy(policy: str, message: str, tmp_path: Path, capsys, monkeypatch) -> None:
    record(policy=policy).write(tmp_path / "plan.json")
    assert message in shown(capsys, monkeypatch, tmp_path / "plan.json")


def test_a_larger_plan_is_not_called_smaller(tmp_path: Path, capsys, monkeypatch) -> None:
    record(dict.fromkeys(CHOSEN, "ef(topk(density=0.02))")).write(tmp_path / "plan.json")
    assert "x more bytes" in shown(capsys, monkeypatch, tmp_path / "plan.json")


def test_figures_as_json(path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "out.json"
    assert "Written" in shown(capsys, monkeypatch, path, "--json", out)
    found = json.loads(out.read_text())
    assert found["command"] == "thinwire plan show"
    assert found["about"]["policy"] == "lgreco(every=100)"
    values = {row["name"]: row["value"] for row in found["results"]}
    assert values["ratio"] == pytest.approx(record().reference_bytes / record().sent_bytes)
    assert (values["error"], values["error_budget"]) == (pytest.approx(5.8637, rel=1e-4), 8.0)
    layers = [row for row in found["results"] if row["name"].startswith("layer/")]
    assert [row["name"] for row in layers] == [f"layer/{name}/sent_bytes" for names in BUCKETS for name in names]
    assert layers[-1]["compressor"] == CHOSEN["net.embed.weight"]


def drawn(of: PlanRecord, folder: Path, capsys, monkeypatch) -> str:
    of.write(folder / "plan.json")
    shown(capsys, monkeypatch, folder / "plan.json", "--svg", folder / "plan.svg")
    return (folder / "plan.svg").read_text()


def test_the_picture_of_one_family(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    svg = drawn(record(), tmp_path, capsys, monkeypatch)
    # matplotlib leaves each text beside its outlines as a comment.
    for text in ("reference: 0.01", "chosen", "density (share of elements sent)", "size, MB", "bucket 0", "0.up"):
        assert f"<!-- {text} -->" in svg
    assert "<!-- layers in the order they are sent (1 that stay raw are left out) -->" in svg
    assert drawn(record(), tmp_path, capsys, monkeypatch) == svg


def test_the_picture_of_several_families(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    chosen = CHOSEN | {"net.0.up.weight": "ef(minmax(bits=3))", "net.1.up.weight": "ef(powersgd(rank=2))"}
    svg = drawn(record(chosen), tmp_path, capsys, monkeypatch)
    for text in ("topk", "minmax", "powersgd", "bits sent an element", "reference"):
        assert f"<!-- {text} -->" in svg


@pytest.mark.parametrize(
    ("chosen", "reference", "text"),
    [
        (dict.fromkeys(CHOSEN, "minmax(bits=3)"), "minmax(bits=4)", "reference: 4 bits"),
        (dict.fromkeys(CHOSEN, "ef(powersgd(rank=2))"), "ef(powersgd(rank=4))", "reference: rank 4"),
        (dict.fromkeys(CHOSEN, "ef(fft(theta=0.95))"), "ef(fft(theta=0.9))", "share of the spectrum kept"),
        (dict.fromkeys(CHOSEN, "natural"), "natural", "bits sent an element"),
        ({**CHOSEN, "net.0.up.weight": "raw"}, REFERENCE, "raw"),
        ({"net.embed.weight": "minmax(bits=3)"}, "minmax(bits=4)", "raw"),
        (dict.fromkeys(CHOSEN, "topk(density=0.1) | minmax(bits=8)"), REFERENCE, "topk | minmax"),
    ],
)
def test_pictures_of_other_parameters(chosen, reference: str, text: str, tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    assert f"<!-- {text} -->" in drawn(record(chosen, reference), tmp_path, capsys, monkeypatch)


def test_names_are_no_formulas_and_many_layers_are_numbered(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    strange = {"a$\\frac$.weight": parse("minmax(bits=3)"), "b<script>.weight": parse("minmax(bits=4)")}
    svg = drawn(of_rules(strange), tmp_path, capsys, monkeypatch)
    assert "<script>" not in re.sub(r"<!--.*?-->", "", svg)
    many = {f"layers.{i}.weight": parse("minmax(bits=4)") for i in range(120)}
    svg = drawn(of_rules(many), tmp_path, capsys, monkeypatch)
    assert "<!-- 100 -->" in svg
    assert "layers.7" not in svg


def test_where_nothing_is_compressed_there_is_nothing_to_draw(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    record({}, "raw").write(tmp_path / "plan.json")
    assert cli.main(["plan", "show", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "out.svg")]) == 64
    assert "no layer is compressed" in capsys.readouterr().err
    assert not (tmp_path / "out.svg").exists()


def test_a_file_that_is_not_there(tmp_path: Path, capsys) -> None:
    assert cli.main(["plan", "show", str(tmp_path / "none.json")]) == 64
    assert "none.json" in capsys.readouterr().err.replace("\n", "")


def test_help_has_examples(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "show", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "thinwire plan show plan.json --svg plan.svg" in out
    assert "--json" in out
    assert cli.main(["--help"]) == 0
    assert "plan show" in capsys.readouterr().out
