"""Examples of tasks whose labels are more than a name: conversations, questions about a context.

>>> messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
>>> conversation(messages, "<{role}>{content}").texts
('<user>hi<assistant>', 'hello')
"""

from collections.abc import Mapping, Sequence

from jaxformer.data.labelled_text import Example

SPEAKER = "assistant"


def conversation(messages: Sequence[Mapping[str, str]], template: str) -> Example:
    """A conversation as an example: what is given and what is said, in turns.

    Args:
      messages: each with role and content; the last one is the assistant's.
      template: of one message, as of `config.Labelled`.

    Raises:
      ValueError: a message lacks role or content, or the assistant does not have the last word.
    """
    before, after = template.split("{content}")
    texts, given = [], ""
    for message in messages:
        role, content = (message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a message has no role or no content that is text")
        opening = before.replace("{role}", role)
        if role == SPEAKER:
            texts += [given + opening, content + after.replace("{role}", role)]
            given = ""
        else:
            given += opening + content + after.replace("{role}", role)
    if given or not texts:
        raise ValueError(f"the last message is not the {SPEAKER}'s")
    return Example(texts, "conversation")


def question(asked: str, context: str, answers: Sequence[tuple[int, str]], name: str = "") -> Example:
    """An example of a question.

    Args:
      asked: the question.
      context: the text that may hold its answer.
      answers: first character in the context, and text, of each right answer; none: it has no answer.
      name: of the question.

    Raises:
      ValueError: an answer is not where it is said to be.
    """
    for begin, text in answers:
        if not text or context[begin : begin + len(text)] != text or begin < 0:
            raise ValueError(f"the answer {text!r} is not at character {begin} of its context of {len(context)}")
    return Example([asked, context], {"id": name, "context": context, "answers": [[b, text] for b, text in answers]})
