"""Several conversations streaming at once from one model, each in its own thread: python examples/streaming.py"""

from concurrent.futures import ThreadPoolExecutor

from twostroke.engine import LLM, SamplingParams

QUESTIONS = ["Name three colours.", "What is a state machine?", "Count from one to ten."]
PARAMS = SamplingParams(temperature=0, max_tokens=24, stop="\n\n")


def ask(llm: LLM, question: str) -> str:
    """One user's thread: print the answer as it comes; leaving the block early would abort the request."""
    answer = ""
    with llm.stream([{"role": "user", "content": question}], PARAMS) as stream:
        for delta in stream:
            answer += delta.text
            print(f"{question[:20]:<22}{delta.text!r}")
    return answer


def main() -> None:
    """All users at once."""
    with LLM("smollm2", device="cpu") as llm, ThreadPoolExecutor() as users:
        for question, answer in zip(QUESTIONS, users.map(lambda question: ask(llm, question), QUESTIONS), strict=True):
            print(f"\n{question}\n  {answer}")


if __name__ == "__main__":
    main()
