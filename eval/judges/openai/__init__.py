"""The judge behind any server that speaks the OpenAI chat protocol.

judge      asks, retries and counts what it costs
client     one question, until a whole reply is kept
batch_api  many questions at half the price
cache      replies on disk before anyone uses them
budget     prices, the estimate, the cap
pace       when to send the next request
"""
