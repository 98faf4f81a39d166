"""When passages are relevant to a question: the floor that is calibrated for each generation. Pure.

Every model has its own geometry: unrelated texts have cosines around 0.1 by one model and around 0.75 by another one.
So a generation's floor is measured on its own vectors, with two kinds of questions: everyday ones, most of which no
collection answers, and known items, which are a few words of a stored passage (docs/adr/0072-relevance-floor.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

UNRELATED_SHARE = 0.95
"""The share of unrelated questions that are below the floor."""
ANSWERED_SHARE = 0.33
"""An everyday question that is nearer to a passage than this share of the known items counts as answered by the
collection, and is left out. (A few words of a passage are a poorer question than people ask.)"""
KNOWN_WORDS = 10
"""The words of a known item."""
GROWTH = 3
"""A collection that has grown so many times over has nearer neighbours for any question: it is calibrated again."""
FEWEST_CHUNKS = 5


@dataclass(frozen=True, slots=True)
class Calibration:
    """The floor of one generation, with what it was measured on."""

    cosine: float
    """The floor: a question whose nearest passage has a lower cosine is not answered."""
    unrelated: float
    """The cosine of the nearest passage that three quarters of the unrelated questions stay below. Words in common
    count from it on."""
    known: float
    """The median cosine of the nearest passage to the known items."""
    random: float
    """The mean cosine of two random passages."""
    chunks: int
    """The number of chunks at that time."""
    questions: int
    """The number of unrelated questions, without those that count as answered."""
    at: str
    """The time, in ISO 8601."""
    reranker: str = ""
    """The model of the reranker whose floor is ``rerank``; empty: none was calibrated."""
    rerank: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A floor, and how many unrelated questions it was derived from."""

    floor: float
    unrelated: float
    known: float
    questions: int


def measure(everyday: Sequence[float], known: Sequence[float]) -> Measured:
    """The floor from the best score of each everyday question and of each known item; neither may be empty.

    Law: it never exceeds the score below which ANSWERED_SHARE of the known items are, however many everyday questions
    the collection answers; and it moves with the scores, so any increasing linear change of them changes no verdict.
    """
    answered = quantile(known, ANSWERED_SHARE)
    unrelated = [score for score in everyday if score < answered]
    if not unrelated:  # the collection answers all of them: nothing is known of questions that it does not answer
        return Measured(answered, min(known), quantile(known, 0.5), 0)
    floor = min(answered, quantile(unrelated, UNRELATED_SHARE))
    return Measured(floor, quantile(unrelated, 0.75), quantile(known, 0.5), len(unrelated))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is, in hundredths, interpolated."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def known_item(text: str, seed: int) -> str:
    """KNOWN_WORDS neighbouring words of a text. seed: any number, which decides on their place."""
    words = text.split()
    start = seed % max(1, len(words) - KNOWN_WORDS + 1)
    return " ".join(words[start : start + KNOWN_WORDS])


def is_due(calibration: Calibration | None, chunks: int) -> bool:
    """Whether a collection of so many chunks has to be calibrated."""
    if calibration is None:
        return chunks >= FEWEST_CHUNKS
    return chunks >= GROWTH * calibration.chunks


EVERYDAY = tuple(
    """
how do I remove red wine from a tablecloth
which vegetables can be sown in early spring
opening hours of the public swimming pool
what should I pack for a week of skiing
who painted the ceiling of the Sistine Chapel
when is the next full moon
how long does a passport renewal take
cheap flights to Lisbon in May
what causes hiccups
how do I descale an espresso machine
best exercises for lower back pain
how are school grades calculated
what is the longest river in Africa
how do bees make honey
rules for offside in soccer
which wine goes with grilled salmon
how do I file a claim with my travel insurance
how often should a cat be vaccinated
when do the clocks change to summer time
what is the population of Norway
how much salary does a nurse earn
how do I cancel my gym membership
what are the side effects of ibuprofen
how do I tune a violin
who wrote Pride and Prejudice
when was the Berlin Wall built
how do I change a flat bicycle tyre
what does the company pay for overnight stays
where do I hand in my sick note
how do I book a meeting room for tomorrow
who approves purchase orders above five thousand euros
which documents do new employees need on their first day
deadline for submitting the tax return
minutes of the last works council meeting
price list for the spring catalogue
how is overtime compensated
how do I return a damaged parcel
terms of payment for foreign customers
who is the contact person at the landlord
what did the auditors criticise last year
agenda for the team offsite in October
which supplier delivers our printer paper
how do I reset my voicemail PIN
my laptop screen flickers after the update
how do I connect to the printer on the second floor
why is the video call so choppy
how do I recover a deleted email
which antivirus product do we use
how do I unsubscribe from the newsletter
how do I set up two-factor authentication on my phone
what is the difference between a virus and a bacterium
how does photosynthesis work
why is the sky blue
how does a heat pump work
how far is the moon from the earth
what is the boiling point of ethanol
how do volcanoes erupt
what is the speed of sound in water
how is steel made from iron ore
why do leaves change colour in autumn
how does a nuclear power plant generate electricity
what is dark matter
how is the area of a triangle calculated
what is a prime number
how do I solve a quadratic equation
what is the standard deviation of a sample
how does a combustion engine work
how do airplanes stay in the air
how strong must a roof beam be for heavy snow
how is concrete reinforced
what voltage do European power sockets have
how do I replace the brake pads of my car
how do I write a formula in a spreadsheet
how do I sort a table by two columns
how do I rename many files at once
what is the difference between a list and a queue
how do I install a new hard disk
how do I make a backup of my database
which programming language should a beginner learn
how do I deploy a website
what does error code 404 mean
how do I speed up a slow query
how do I write a cover letter
grammar rules for the use of the comma
how do you say thank you in Japanese
what is the plot of Hamlet
lyrics of a lullaby for babies
which instruments belong to a string quartet
famous paintings of the impressionists
what did Aristotle teach about virtue
how do central banks fight inflation
what is the difference between stocks and bonds
how is a mayor elected
what rights do tenants have when the rent goes up
when may an employer dismiss somebody
penalty for parking on the pavement
how do I apply for a building permit
who inherits when there is no will
treaty that ended the First World War
causes of the fall of the Roman Empire
emperors of the Ming dynasty
which animals hibernate
how fast can a cheetah run
what do hedgehogs eat
how do I train a puppy not to bark
how do I prepare a garden pond for winter
recipe for lentil soup
how long must potatoes boil
how do I make yeast dough rise faster
substitute for eggs in pancakes
how much sleep does a teenager need
treatment of a sprained ankle
what helps against hay fever
how is diabetes diagnosed
what happens during a pregnancy in the third month
how do I learn to play chess
which board games suit six players
results of the Champions League final
how is a tennis match scored
training plan for a first marathon
""".strip().splitlines()
)
"""Questions from many walks of life. A collection answers few of them, and those few are left out."""
