#!/bin/sh
# The agent of towns_agent.py without tools of the API: it looks for the call in the text. Needs curl, sed and grep.
complete() {  # of messages as JSON; prints the content of the answer as JSON writes it
  reply=$(curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d "{\"messages\": [$1]}") || exit 1
  printf %s "$reply" | sed -nE 's/.*"content": *"(([^"\\]|\\.)*)".*/\1/p'
}

messages=$(printf %s "$RLCORE_TASK" | sed -E 's/.*"messages": \[(.*)\], "columns".*/\1/')
answer=$(complete "$messages") || exit 1
query=$(printf %s "$answer" | sed -nE 's/.*<tool:search>(.*)<\/tool>.*/\1/p')
test -n "$query" || exit 0
found=$(grep -Fm 1 -- "$query" towns.jsonl | sed -E 's/.*"text": "(.*)"}/\1/')
turns="{\"role\": \"assistant\", \"content\": \"$answer\"}, {\"role\": \"tool\", \"content\": \"${found:-nothing found}\"}"
complete "$messages, $turns"
