"""Solved problems of our own for ``kvserve eval --num-fewshot``, in GSM8K's form."""

from __future__ import annotations

GSM8K_EXEMPLARS = (
    (
        "A bakery fills 6 trays with 8 rolls each. By noon 29 rolls are sold. How many are left?",
        "6 trays of 8 rolls are 6 * 8 = 48 rolls. Of these 48 - 29 = 19 are left.\n#### 19",
    ),
    (
        "Nadia reads 15 pages a day and Ivo reads twice as many. How many pages do they read "
        "together in 5 days?",
        "Ivo reads 2 * 15 = 30 pages a day. Together they read 15 + 30 = 45 pages a day. In 5 days "
        "that is 5 * 45 = 225 pages.\n#### 225",
    ),
    (
        "A ticket for the ferry costs $7, and a bicycle costs $3 more. A family of 4 takes 2 "
        "bicycles along. What do they pay?",
        "A bicycle costs 7 + 3 = 10 dollars. The tickets cost 4 * 7 = 28 dollars and the bicycles "
        "2 * 10 = 20 dollars. They pay 28 + 20 = 48 dollars.\n#### 48",
    ),
    (
        "Half of the 84 chairs in a hall are red, and a third of the others are blue. How many "
        "chairs are neither red nor blue?",
        "84 / 2 = 42 chairs are red, and 42 are not. Of these 42 / 3 = 14 are blue. "
        "So 42 - 14 = 28 are neither.\n#### 28",
    ),
    (
        "A tank holds 300 litres. A pump fills 25 litres a minute while a leak loses 5 litres a "
        "minute. How long does it take to fill the empty tank?",
        "Each minute the tank gains 25 - 5 = 20 litres. It is full after 300 / 20 = 15 minutes."
        "\n#### 15",
    ),
    (
        "Omar is 12 years old. His sister is 4 years younger, and their aunt is three times as old "
        "as both together. How old will the aunt be in 5 years?",
        "The sister is 12 - 4 = 8 years old. Together they are 12 + 8 = 20. The aunt is 3 * 20 = "
        "60 now, and 60 + 5 = 65 in 5 years.\n#### 65",
    ),
    (
        "A shop lowers the price of an $80 coat by 25 percent, and then by another $10. What does "
        "the coat cost now?",
        "25 percent of 80 is 20, so the coat costs 80 - 20 = 60 dollars. Another 10 less makes "
        "60 - 10 = 50 dollars.\n#### 50",
    ),
    (
        "Lena plants 5 rows of 12 carrots. Rabbits eat 1 in 6. She sells half of what is left "
        "at 2 for $1. How much does she earn?",
        "She plants 5 * 12 = 60 carrots. Rabbits eat 60 / 6 = 10, so 60 - 10 = 50 are left. She "
        "sells 50 / 2 = 25. At 2 for a dollar that is 25 / 2 = 12.5 dollars.\n#### 12.5",
    ),
)
"""Question and answer; both are ours, and none is of the data set."""
