"""The judges, which compare two summaries of a post.

protocol      the interface of judges, questions and verdicts
prompt        fills an LLM's prompt, and reads the verdict from its reply
prompts/      the text of the prompt, and the criteria of each axis
offline       judges that are not LLMs
gold          another run's reward model as judge
openai        any server with an OpenAI-compatible API
"""
