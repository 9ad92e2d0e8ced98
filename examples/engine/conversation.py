"""What the demo talks about: a text long enough that computing it takes a while, and questions."""

from __future__ import annotations

HANDBOOK = """\
Answer the visitor's questions from this handbook. Keep each answer short.

The Merrow Point lighthouse stands on a granite headland at the western end of the island of
Sorrel. It was built between 1868 and 1871 by the engineer Agnes Harrow, who had drawn the plans
while recovering from a broken leg. The tower is forty-one metres tall and painted white with one
broad green band. Two hundred and seven steps lead from the door to the lamp room. Before the
lighthouse was built, eleven ships had been lost on the reef called the Combs within ten years.

The first lamp burned rape oil and had to be trimmed every four hours, day and night, by a keeper
and two assistants. In 1904 the oil lamp was replaced by a paraffin burner, and in 1937 a cable
from the mainland brought electricity. The great lens, which was ground in Lyon and weighs two
tonnes, floats on a bath of mercury so that a child can turn it with one finger. It shows two
white flashes every fifteen seconds, and on a clear night sailors see them from thirty-three
kilometres away. The fog horn, a later addition, was switched off in 1989, because ships no
longer relied on it and because the goats on the headland had stopped breeding.

Keepers lived in the three stone cottages below the tower. The last of them, Tobias Wren, left on
the first of October 1991, when the light became automatic. He had served for twenty-six years
and had written down the weather every single day. His notebooks, sixty-four of them, fill a shelf
in the museum, and meteorologists still come to copy figures out of them. The smallest cottage is
now the museum, the middle one holds a tea room, and the largest one is let to guests by the week.

The museum is open from April to October, from ten in the morning until five in the afternoon,
and is closed on Tuesdays. A ticket costs six pounds for adults and two pounds for children; the
climb to the lamp room is included, but children under eight may climb only with an adult. Dogs
are welcome in the tea room and on the headland, not in the tower. The tea room is known for its
seaweed scones, baked from a recipe that the second keeper's wife brought from the Faroe Islands.

The island is reached by a ferry from Port Callan. In summer the ferry sails four times a day, at
eight, eleven, two and six o'clock; in winter it sails once, at eleven. The crossing takes fifty
minutes. From the landing stage a footpath of three kilometres leads along the cliffs to the
lighthouse. Visitors who can't walk so far may call the island's only taxi, a blue van that is
driven by the postmistress, Ms Odell, whenever she isn't delivering letters. In strong westerly
winds the path is closed, because spray from the blowhole known as the Kettle reaches it.

Seals rest on the Combs at low tide, and from May to July about four thousand pairs of puffins
nest in the turf behind the cottages. Please stay on the marked paths during that time. The
wardens lead a walk every Saturday at nine; it is free, and lasts about two hours. Binoculars may
be borrowed from the museum against a deposit of ten pounds. At night the headland is closed to
visitors, except on the last Friday of each month, when the astronomers of the island's society
set up their telescopes beside the tower, screened from the beam by a canvas wall.
"""

QUESTIONS = (
    "Who built the lighthouse, and how tall is it?",
    "Who was the last keeper, and what did he write down every day?",
    "When does the ferry sail in summer?",
    "How many puffins nest there, and when?",
    "What is the tea room known for?",
    "How much is a ticket for a child?",
    "What happened to the fog horn?",
    "On which day is the museum closed?",
)
