"""Links between the pages, and from them into the repository, lead somewhere."""

from collections.abc import Callable
from typing import Any

WEB = ("http://", "https://", "mailto:")


def problem(page: Any, target: str, anchors: dict[str, set[str]]) -> str:
    """Return what is wrong with a link on a page; "" for nothing."""
    name, _, anchor = target.partition("#")
    path = (page.path.parent / name).resolve() if name else page.path
    if not path.exists():
        return f"{page}: {target} leads to no file"
    if anchor and anchor not in anchors.get(str(path), set()):
        return f"{page}: {target} names no heading of {path.name}"
    return ""


def test_every_link_leads_somewhere(pages: list[Any]) -> None:
    anchors = {str(page.path): page.anchors() for page in pages}
    links = [(page, target) for page in pages for target in page.links() if not target.startswith(WEB)]
    assert len(links) >= 20
    assert [why for page, target in links if (why := problem(page, target, anchors))] == []


def test_a_dead_link_is_noticed(page: Callable[[str], Any]) -> None:
    slo = page("slo.md")
    anchors = {str(slo.path): slo.anchors()}
    assert problem(slo, "#rejections", anchors) == ""
    assert problem(slo, "#rejectoins", anchors)
    assert problem(slo, "nothing.md", anchors)


def test_every_page_is_linked_from_another(pages: list[Any]) -> None:
    linked = {
        (page.path.parent / target.partition("#")[0]).resolve()
        for page in pages
        for target in page.links()
        if not target.startswith(("#", *WEB))
    }
    assert [str(page) for page in pages if page.path not in linked and page.path.name != "README.md"] == []


def test_pictures_are_used_and_small(pages: list[Any]) -> None:
    used = {(page.path.parent / target).resolve() for page in pages for target in page.links()}
    pictures = sorted((pages[1].path.parent / "pictures").iterdir())
    assert pictures
    assert [picture.name for picture in pictures if picture not in used] == []
    assert [picture.name for picture in pictures if picture.stat().st_size > 300_000] == []
