"""Who compares two summaries of a post.

protocol      what a judge is and what it says
prompt        the question to an LLM, and what its reply prefers
offline       judges that are no LLM
gold          another run's reward model
other_facts   a text with wrong facts, which a judge must notice
smollm        the smallest real chat model, for a server
openai        any server that speaks the OpenAI protocol
"""
