"""Who compares two summaries of a post.

protocol      what a judge is and what it says
prompt        the question to an LLM, and what its reply prefers
offline       judges that are no LLM
gold          another run's reward model
openai        any server that speaks the OpenAI protocol
"""
