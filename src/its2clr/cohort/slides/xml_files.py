"""Read XML written by annotation tools; declarations that could expand or fetch anything are refused."""

import xml.etree.ElementTree as ET
from pathlib import Path

from its2clr.errors import InputError

_ADVICE = "save the annotations again"


class _NoDocumentType(ET.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Refuse a document type: only there can entities be declared."""
        del pubid, system
        raise InputError(f"has a document type ({name}), which annotation files never need")


def read_xml(path: Path) -> ET.Element:
    """Read a whole XML file.

    Returns:
        Its root.

    Raises:
        InputError: If it is no well-formed XML, or declares a document type.
    """
    try:
        return ET.fromstring(path.read_bytes(), parser=ET.XMLParser(target=_NoDocumentType()))  # noqa: S314
    except InputError as error:
        raise InputError(f"{path}: {error}; remove it, or {_ADVICE}") from error
    except ET.ParseError as error:
        line, column = error.position
        raise InputError(f"{path}: line {line}, column {column + 1}: is not whole XML ({error}); {_ADVICE}") from error
    except (LookupError, ValueError) as error:
        raise InputError(f"{path}: its text cannot be decoded ({error}); {_ADVICE}") from error
