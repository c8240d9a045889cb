"""
The sentences of the data set word_order: who did what to whom, in an order of words that the first word names, and a question.

    svo : cat eats fish . who eats ? cat                           subject, verb, object
    sov : cat fish eats , dog bird sees . sees whom ? bird         subject, object, verb
    vso : eats cat fish . eats whom ? fish                         verb, subject, object

A line has one or more clauses. Order, nouns, verbs, the clause asked about and the question ("who" for its subject, "whom" for
its object) are drawn uniformly and independently; no noun and no verb occurs twice in a line. The verb of the question leads to
the clause, and there only the order of the words tells subject from object.

What a bag of words cannot beat
-------------------------------
A bag of words knows which words stand before the answer, and how often, but not in which order. Take a line of n clauses. Its
2n nouns fill 2n places (n subjects, n objects), and all (2n)! ways to fill them are equally likely; each gives the same bag,
since order, verbs and question stay as they are. So for anyone who knows only the bag, each of the 2n nouns is the one asked for
with probability 1/(2n). Hence

    accuracy <= 1/(2n)        loss of the answer >= ln(2n) nats        (n = 1: 1/2 and 0.693)

Word order lifts this to accuracy 1 and loss 0.

Mind that a GPT without position encoding is no bag of words: its causal mask lets a second layer count what came before
(Haviv et al. 2022, arXiv:2203.16634). With a single layer it is one at the answer, which sees all earlier words through one
softmax that does not know their order.
"""
import math
import random

NOUNS = 'ant bear bee bird cat cow crab crow deer dog duck fish fox frog goat hare hen horse lion mouse owl pig seal wolf'.split()
VERBS = 'chases eats fears finds follows hears helps knows likes meets saves sees'.split()
ORDERS = ('svo', 'sov', 'vso')
MOST_CLAUSES = min(len(NOUNS) // 2, len(VERBS))         # 12

# every token that a line may hold, its leading blank included: see WordTokenizer
VOCABULARY = ['\n', *ORDERS] + [' ' + word for word in [':', ',', '.', '?', 'who', 'whom', *NOUNS, *VERBS]]


def sentence(order, subjects, verbs, objects, asked, question):
    """
    The words up to the question mark, and the answer. subjects, verbs and objects hold a word for each clause; `asked` is the
    clause that the question is about, and `question` 'who' for its subject or 'whom' for its object.
    """
    prompt = [order]
    for clause, (subject, verb, object) in enumerate(zip(subjects, verbs, objects)):
        words = {'s': subject, 'v': verb, 'o': object}
        prompt += [',' if clause else ':'] + [words[letter] for letter in order]
    if question == 'who':
        return prompt + ['.', 'who', verbs[asked], '?'], subjects[asked]
    return prompt + ['.', verbs[asked], 'whom', '?'], objects[asked]


def example(clauses, generator):
    """A random sentence with that many clauses, 1 to MOST_CLAUSES; `generator` is a random.Random."""
    order = generator.choice(ORDERS)
    nouns = generator.sample(NOUNS, 2 * clauses)
    verbs = generator.sample(VERBS, clauses)
    asked, question = generator.randrange(clauses), generator.choice(('who', 'whom'))
    return sentence(order, nouns[:clauses], verbs, nouns[clauses:], asked, question)


def examples(count, clauses, seed):
    """
    `count` examples with that many clauses each: a list of (prompt, answer), where prompt is a list of words and answer a word.
    ' '.join(prompt) is what a model is to be asked, and ' ' + answer the token it should give next.
    """
    generator = random.Random(seed)
    return [example(clauses, generator) for _ in range(count)]


def training_and_validation_lines(train_count, val_count, most_clauses, seed):
    """
    Two lists of lines, with 1 to most_clauses clauses in equal shares. No validation prompt has the same words as a training
    prompt, in whatever order: what is right there cannot have been learnt by heart, nor can the bound be undercut that way.
    """
    generator = random.Random(seed)
    train, validation, bags = [], [], set()
    while len(train) < train_count:
        prompt, answer = example(1 + len(train) % most_clauses, generator)
        train.append(' '.join(prompt + [answer]) + '\n')
        bags.add(tuple(sorted(prompt)))
    while len(validation) < val_count:
        prompt, answer = example(1 + len(validation) % most_clauses, generator)
        if tuple(sorted(prompt)) not in bags:
            validation.append(' '.join(prompt + [answer]) + '\n')
    generator.shuffle(train)                            # otherwise the number of clauses could be told from the line before
    generator.shuffle(validation)
    return train, validation


def bounds(most_clauses):
    """
    What can be reached on lines of 1 to most_clauses clauses in equal shares; losses in nats.

    best_loss            mean loss per token of a model that knows how lines are made: the entropy of a line over its length
    bag_of_words_loss    the same model, but for its answers it has only the bag of the words before
    bag_of_words         by number of clauses: the accuracy and loss of such an answer
    """
    line_entropy, line_length, answer_loss = math.log(most_clauses), 0, 0
    for clauses in range(1, most_clauses + 1):
        choices = [len(ORDERS), math.perm(len(NOUNS), 2 * clauses), math.perm(len(VERBS), clauses), clauses, 2]
        line_entropy += sum(map(math.log, choices)) / most_clauses
        line_length += (4 * clauses + 7) / most_clauses         # tag, 4 tokens a clause, '. who eats ?', answer, '\n'
        answer_loss += math.log(2 * clauses) / most_clauses
    return {'best_loss': line_entropy / line_length, 'bag_of_words_loss': (line_entropy + answer_loss) / line_length,
            'bag_of_words': {clauses: {'accuracy': 1 / (2 * clauses), 'loss': math.log(2 * clauses)}
                             for clauses in range(1, most_clauses + 1)}}
