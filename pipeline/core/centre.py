"""The part that all vectors of a model share, which is subtracted before sketches are made. Pure.

The reasons and measurements are in docs/adr/0123-centred-sketches.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a tenth of a second to import, for processes that never embed
    import numpy as np
    from numpy.typing import NDArray

CENTRE_TEXTS = tuple(
    """
Invoices are due within thirty days of receipt; reminders go out after two weeks.
Der Antrag auf Elternzeit ist spätestens sieben Wochen vorher schriftlich einzureichen.
def mean(values): return sum(values) / len(values)
2026-03-14 09:21:07 ERROR worker 3: connection to the database was lost, retrying in 5 s
Le service informatique sera fermé le lundi de Pentecôte.
Soak the beans overnight, drain them, and simmer with bay leaves for an hour.
Who approves purchase orders above five thousand euros?
Ms Okafor moved to the Lyon office in April and now leads procurement.
SELECT name, amount FROM orders WHERE amount > 100 ORDER BY amount DESC;
Theorem: every bounded sequence of real numbers has a convergent subsequence.
Thanks, that fixed it! I'll close the ticket tomorrow.
La reunión del comité se aplaza hasta nuevo aviso.
Table 4: tensile strength in MPa, by alloy and temperature
The patient reports mild headaches since the dose was doubled.
Quarterly revenue grew by four per cent, mostly in Asia.
Turn the valve clockwise until the gauge reads zero, then remove the cover.
会议将于周三上午十点在二楼举行。
The tenant shall not sublet the premises without prior written consent.
Once upon a time a fox lived at the edge of a dark wood.
how do I reset my voicemail PIN
Supported formats: PDF, DOCX, XLSX, PNG and plain text.
Migrating geese follow the river south in late October.
As discussed, please find the revised offer attached. Kind regards
Il motore va revisionato ogni diecimila ore di esercizio.
{"status": "shipped", "carrier": "sea", "pallets": 12}
The treaty was signed in 1648 and ended thirty years of war.
Goal in the ninetieth minute: the visitors win two to one.
Release notes: faster start, fewer permissions, and a fix for duplicate notifications.
Boiling point of ethanol at one bar: 78.4 °C
Neue Kolleginnen und Kollegen erhalten ihren Ausweis am Empfang.
We interviewed forty commuters; most of them would cycle if there were safe parking.
Chapter 7. Maintenance
""".strip().splitlines()
)
"""Texts of many kinds, languages and subjects: their vectors have in common what the model gives to all."""
ALIKE_COSINE = 0.25
"""Below this average cosine, there is nothing to subtract: with .24 as many of the nearest rows are found either way,
and the mean of a few texts has an error."""


def centre_of(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the centre of a model from its vectors of ``CENTRE_TEXTS``, without those that it refuses, shape
    (n, dimensions), unit length: their mean, or zeros where they are not alike."""
    import numpy as np

    texts = len(vectors)
    if texts < 2:
        return np.zeros(vectors.shape[1], np.float32)
    mean = vectors.mean(axis=0)
    alike = (texts * float(mean @ mean) - 1) / (texts - 1)
    return mean if alike >= ALIKE_COSINE else np.zeros_like(mean)
