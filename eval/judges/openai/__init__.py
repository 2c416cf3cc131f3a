"""The judge behind any server that speaks the OpenAI chat protocol.

judge      asks, retries and counts what it costs
client     one question, until a whole reply is kept
dialect    what a server's refusals say
replies    what a server sends back, and when to ask again
cache      replies on disk before anyone uses them
budget     prices, the estimate, the cap, the bill
"""
