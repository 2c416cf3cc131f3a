"""The judge behind any server that speaks the OpenAI chat protocol.

server_judge  asks, retries and counts what it costs
client        a question as it is sent, until a whole reply is kept
replies       what a server sends back or refuses, and when to ask again
cache         replies on disk before anyone uses them
budget        prices, the estimate, the cap, the bill
"""
