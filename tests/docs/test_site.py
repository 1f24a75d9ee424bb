"""The site: built without a warning, whole by itself, with every public name and every field of a config in it."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import jaxformer
from jaxformer import decoding
from jaxformer.config.reference import reference
from jaxformer.scaling.ladder import StudyConfig
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def pages(site):
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_nothing_is_fetched_from_elsewhere(site):
    """No script, style, font or picture of another host; links to read are none either, but those of the theme."""
    for name, text in pages(site).items():
        assert not re.findall(r'(?:src|srcset|data-src)="(?:https?:)?//[^"]*', text), name
        assert not re.findall(r'<link[^>]*href="(?:https?:)?//[^"]*', text), name
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_what_pages_show_and_link_to_is_there(site):
    for name, text in pages(site).items():
        if name == "404.html":  # its links are absolute, since it is shown in place of any page
            continue
        for target in re.findall(r'(?:src|href)="([^"#?]+)[^"]*"', text):
            if not re.match(r"[a-z]+:", target):
                there = Path(os.path.normpath((site / name).parent / unescape(target)))
                assert there.exists(), f"{name}: {target}"


def test_every_name_is_in_the_reference(site):
    found = set(re.findall(r'id="(jaxformer[\w.]*)"', "".join(pages(site).values())))
    for package in (jaxformer, decoding):
        for name in package.__all__:
            value = getattr(package, name)
            if name not in ("Array", "Params", "bert", "encoder_decoder", "gpt", "masks", "patterns"):
                assert f"{value.__module__}.{name}" in found, name


def test_every_field_is_told(site):
    text = unescape((site / "api" / "fields.html").read_text(encoding="utf-8"))
    for field in reference(StudyConfig):
        assert f"<code>--config.{field.path}={field.default}</code>" in text, field.path


def test_lists_of_included_pages_are_lists(site):
    """Python-Markdown wants a blank line, or four spaces, where GitHub does not."""
    for name, text in pages(site).items():
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"^(?:- |\d\. |\| )", paragraph, re.MULTILINE), f"{name}: {paragraph[:200]}"


def test_doctests_are_code(site):
    """A `>>>` outside a block of code would be three quotations inside each other."""
    for name, text in pages(site).items():
        if name.startswith("api/"):
            assert "<blockquote>" not in text, name
