"""Who compares two summaries of a post.

protocol      what a judge is and what it says
prompt        the question to an LLM, and what its reply prefers
prompts/      the text of the question, and the criteria of each axis
offline       judges that are no LLM
gold          another run's reward model
openai        any server that speaks the OpenAI protocol
"""
