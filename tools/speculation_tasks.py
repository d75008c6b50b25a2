"""Requests of which speculation makes much or little.

Owns the prompts. Surprising rule: the small model copies best what is asked for in plain words; every copy task gives
it the text to copy within the request.
"""

from __future__ import annotations

CHAT = [
    "Explain why the sky is blue to a ten year old.",
    "What are three good habits for learning a new language?",
    "Write a short story about a fox who finds a clock.",
    "How do I boil an egg so that the yolk stays soft?",
    "Describe the water cycle in a few sentences.",
    "Write a polite e-mail that asks a landlord to fix a window.",
    "What is the difference between weather and climate?",
    "Give me some ideas for a birthday party in a park.",
    "Why do cats purr?",
    "Explain what a variable is in programming.",
    "Write a poem about the first snow of winter.",
    "How can I save money on groceries?",
    "What happened in the Industrial Revolution?",
    "Suggest a plan for a weekend in the mountains.",
    "How does a bicycle stay upright?",
    "Tell me about the planet Saturn.",
    "What should I consider before adopting a dog?",
    "Explain photosynthesis simply.",
    "Write a dialogue between a baker and a customer.",
    "What are the benefits of walking every day?",
    "How do vaccines work?",
    "Describe a quiet morning by the sea.",
    "What is a good way to start a speech?",
    "Explain the rules of chess to a beginner.",
]

_LISTS = [
    "apples, bread, cheese, dates, eggs, flour, grapes, honey, ice, jam, kale, lemons, milk, nuts, olives, pears",
    "red, orange, yellow, green, blue, indigo, violet, black, white, brown, pink, grey, purple, gold, silver, cyan",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, January, February, March, April, May, June, July",
    "hammer, saw, drill, wrench, pliers, screwdriver, level, chisel, file, clamp, ladder, tape, nails, screws, glue",
]

_PASSAGES = [
    "The old lighthouse stood at the end of the pier, and every evening the keeper climbed its ninety steps to "
    "light the lamp. Ships that passed far out at sea would answer with a short blast of their horns, and the "
    "keeper would wave, though he knew that nobody could see him from so far away.",
    "A good garden begins with good soil. Before anything is planted, the ground should be turned, cleared of "
    "stones and weeds, and mixed with compost. Water drains better through loose soil, roots grow deeper in it, "
    "and the plants that come up are stronger and need less care for the rest of the season.",
    "The first trains were slow and loud, and many people were afraid of them. Farmers thought that the smoke "
    "would harm their cows, and doctors warned that nobody could breathe at such a speed. Within twenty years, "
    "however, the railway had joined every large town in the country, and a journey of a week took a single day.",
    "Honey bees live in large colonies with one queen, some hundreds of drones, and many thousands of workers. "
    "The workers gather nectar and pollen, build the comb, feed the young, and guard the hive. In winter they "
    "form a tight ball around the queen and keep her warm by moving their wings.",
]

_RECORDS = [
    ("name, age, city, job", "Maria Lopez is 34 years old. She lives in Lisbon and works as a nurse."),
    ("title, author, year, pages", "The book The Silent River was written by John Hale in 1987 and has 312 pages."),
    ("product, price, color, stock", "The desk lamp costs 24 dollars, is green, and there are 18 of them in stock."),
    ("team, coach, wins, losses", "The Harbor Hawks, led by coach Dana Reed, have 12 wins and 5 losses."),
]

COPY = [
    task
    for items, passage, (fields, fact) in zip(_LISTS, _PASSAGES, _RECORDS, strict=True)
    for task in (
        f"Repeat this list, one item on each line, but leave out the last item: {items}",
        f"Quote the following passage word for word, and nothing else:\n\n{passage}",
        f"Fill in this JSON object with the fields {fields}, once for each of three equal records, from this "
        f'text: "{fact}" Answer with a JSON array of three equal objects.',
        f"Correct the spelling of this text if need be and repeat the whole of it:\n\n{passage}",
    )
]

TASKS: dict[str, list[str]] = {"chat": CHAT, "copy": COPY}
