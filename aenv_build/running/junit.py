"""Which tests failed, from a JUnit XML report that an untrusted sandbox wrote."""

from __future__ import annotations

from xml.parsers import expat

from aenv_run.errors import InvalidInput

MAX_REPORT_BYTES = 32 << 20
MAX_DEPTH = 64
MAX_TESTS = 200_000
MAX_NAME = 2000


def failed_tests(report: bytes) -> frozenset[str]:
    """The ids (``classname::name``) of the tests that failed or errored.

    No document type is accepted, so that there are no entities to expand and nothing external to fetch.
    """
    if len(report) > MAX_REPORT_BYTES:
        raise InvalidInput(f"the JUnit report is larger than {MAX_REPORT_BYTES >> 20} MiB")
    reader = _Reader()
    try:
        reader.parser.Parse(report, True)
    except expat.ExpatError as error:
        raise InvalidInput(f"the JUnit report is not well-formed XML: {error}") from None
    if not reader.is_junit:
        raise InvalidInput("the report is not JUnit XML: its root is neither testsuites nor testsuite")
    return frozenset(reader.failed)


class _Reader:
    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.is_junit = False
        self._depth = 0
        self._tests = 0
        self._test: str | None = None
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _doctype(self, name: str, system: str | None, public: str | None, internal: bool) -> None:
        raise InvalidInput("the JUnit report declares a document type, which is refused")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._depth == 0:
            self.is_junit = tag in {"testsuites", "testsuite"}
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidInput(f"the JUnit report is nested deeper than {MAX_DEPTH}")
        if tag == "testcase":
            self._tests += 1
            if self._tests > MAX_TESTS:
                raise InvalidInput(f"the JUnit report has more than {MAX_TESTS} tests")
            classname, name = attributes.get("classname", ""), attributes.get("name", "")
            self._test = (f"{classname}::{name}" if classname else name)[:MAX_NAME]
        elif tag in {"failure", "error"} and self._test is not None:
            self.failed.add(self._test)

    def _end(self, tag: str) -> None:
        self._depth -= 1
        if tag == "testcase":
            self._test = None
