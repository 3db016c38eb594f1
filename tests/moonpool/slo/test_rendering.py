"""The preview of a change of objectives, as a terminal shows it."""

from moonpool.commands.arguments import wide_console
from moonpool.slo.rendering import caveats, preview_table, preview_title
from moonpool_proto.v1 import conductor_pb2

ROW = conductor_pb2.SloPreviewRow(
    model="m",
    slo_class="chat",
    stay_admitted=90,
    now_rejected=10,
    now_admitted=5,
    stay_rejected=3,
    met_before=80,
    missed_before=20,
    met_now=85,
    missed_now=5,
    now_rejected_met=4,
    unmeasured=2,
)


def preview(**fields: object) -> conductor_pb2.SloPreview:
    told = {"rows": [ROW], "judged": 108, "span_s": 372.0, "admission": "enforce", "mode": "predicted-uniform"}
    return conductor_pb2.SloPreview(**(told | fields))  # type: ignore[arg-type]


def test_it_tells_before_and_after_and_of_whom_nothing_can_be_known() -> None:
    console = wide_console()
    with console.capture() as captured:
        console.print(preview_table(preview()))
    cells = captured.get().splitlines()[1].split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == [
        "m",
        "chat",
        "108",
        "100 -> 95",
        "10 (4 of them had met their objectives)",
        "5",
        "80.0 % of 100 -> 94.4 % of 90",
    ]
    assert "the last 108 requests that this conductor judged, over 6 min:" in preview_title(preview())
    assert "7 earlier ones" in preview_title(preview(forgotten=7))
    notes = "\n".join(caveats(preview()))
    assert "latencies of the 5 newly admitted are unknown" in notes
    assert "2 admitted requests have no latencies" in notes
    assert "admission is" not in notes


def test_it_says_when_nobody_is_turned_away_anyway_and_when_there_was_nobody() -> None:
    assert any("admission is shadow" in note for note in caveats(preview(admission="shadow")))
    assert any("mode is none" in note for note in caveats(preview(mode="none")))
    assert any("judged after the prefill" in note for note in caveats(preview(mode="load")))
    assert preview_title(conductor_pb2.SloPreview()) == "recent requests: none was judged yet"
    assert not list(caveats(conductor_pb2.SloPreview()))
