"""Prompts that have nothing to do with coloured shapes. The one honest answer to all of them is a fixed sentence.

Whole sentences teach the common ones; sentences put together at random teach the model not to guess at the rest.
"""

from random import Random

TRAINED_PROMPTS = (
    "Write a poem.",
    "Write a poem about the sea.",
    "Write a short story.",
    "Write a song about love.",
    "Write Python code that sorts a list.",
    "Tell me a joke.",
    "Tell me a story about a dragon.",
    "What is the capital of France?",
    "What is the capital of Germany?",
    "What is the capital of Japan?",
    "What is the meaning of life?",
    "What is the weather like today?",
    "What is your favourite food?",
    "What is two plus two?",
    "What is 2+2?",
    "What time is it?",
    "What day is it today?",
    "What animal is this?",
    "What breed is the dog?",
    "What is the name of this city?",
    "What is the person wearing?",
    "What is written on the sign?",
    "What does the text say?",
    "What kind of food is this?",
    "What brand is the car?",
    "What is the man doing?",
    "Who is this person?",
    "Who is the president?",
    "Who wrote Hamlet?",
    "Who painted this?",
    "Who won the world cup?",
    "When was the war?",
    "When was this photo taken?",
    "Where was this photo taken?",
    "Where is the dog?",
    "Where do you live?",
    "Where is Paris?",
    "Why is the sky blue?",
    "How old is the earth?",
    "How old are you?",
    "How many people are in this photo?",
    "How many dogs are there?",
    "How many days are in a year?",
    "How do I bake a cake?",
    "How tall is the tower?",
    "How does a computer work?",
    "Is it raining?",
    "Is the dog happy?",
    "Is this a cat or a dog?",
    "Can you swim?",
    "Can you write code?",
    "Do you like music?",
    "Do you love me?",
    "Are you a robot?",
    "Are you human?",
    "Explain gravity.",
    "Explain how a car works.",
    "Translate this to French.",
    "Translate good morning to Spanish.",
    "Summarize this article.",
    "Give me a recipe.",
    "Give me some advice.",
    "Solve the equation.",
    "Sing a song.",
    "Count to ten.",
    "Play a game with me.",
    "Recommend a book.",
    "Should I buy a house?",
    "I am sad.",
    "I feel tired today.",
    "Please repeat after me.",
    "Describe the dog.",
    "Describe the weather.",
    "Describe your day.",
    "Describe the man.",
    "Is there a dog in this picture?",
    "What colour is the sky?",
    "What colour is the dog?",
    "What color is the car?",
)
HELD_OUT_PROMPTS = (
    "Write a poem about rain.",
    "What is the capital of Italy?",
    "Tell me something funny.",
    "Who invented the telephone?",
    "How do I fix my bike?",
    "Is the woman smiling?",
    "What is the cat eating?",
    "Translate this to German.",
    "Why do birds sing?",
    "Explain the moon to a child.",
    "Give me a list of books.",
    "What is ten minus three?",
)
_OPENINGS = (
    "What is", "Who is", "Where is", "Why is", "How is", "When is", "Tell me about", "Explain", "Write about",
    "Do you know", "Do you like", "Can you find", "Is there", "How much is", "Give me", "Show me", "I want", "I like",
    "Think about", "What about", "Please write about", "Describe", "How many people know", "What colour is",
)  # fmt: skip
_DESCRIPTIONS = ("", "", "", "old ", "new ", "big ", "happy ", "strange ", "best ", "blue ", "little ", "good ")
_NOUNS = (
    "dog", "cat", "house", "tree", "car", "city", "king", "river", "book", "music", "bread", "moon", "sun", "school",
    "doctor", "computer", "window", "money", "friend", "country", "summer", "water", "bird", "horse", "train", "game",
    "phone", "movie", "garden", "family", "street", "mountain", "apple", "coffee", "language", "history", "football",
)  # fmt: skip
_ENDINGS = ("", "", "", " today", " in France", " in the morning", " for me", " and why", " near the sea", " at home")


def off_script_prompt(random: Random, *, is_held_out: bool = False) -> str:
    if is_held_out:
        return random.choice(HELD_OUT_PROMPTS)
    return random.choice(TRAINED_PROMPTS) if random.random() < 0.5 else _random_sentence(random)


def _random_sentence(random: Random) -> str:
    opening, noun = random.choice(_OPENINGS), random.choice(_NOUNS)
    article = random.choice(("the ", "a ", "my ", "this "))
    mark = "?" if opening.split()[0] in ("What", "Who", "Where", "Why", "How", "When", "Do", "Can", "Is") else "."
    return f"{opening} {article}{random.choice(_DESCRIPTIONS)}{noun}{random.choice(_ENDINGS)}{mark}"
