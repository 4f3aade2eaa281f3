#!/bin/sh
# Ask a running `vtoken serve` with curl:  sh examples/curl.sh [http://127.0.0.1:8000]
# With an API key:  API_KEY=... sh examples/curl.sh
set -eu
URL=${1:-http://127.0.0.1:8000}
MODEL=${MODEL:-smollm2-135m}

ask() {
    curl --silent --show-error "$@" ${API_KEY:+--header "Authorization: Bearer $API_KEY"}
    echo
}

echo "# a chat completion with a budget of its own"
ask "$URL/v1/chat/completions" --header 'Content-Type: application/json' --data '{
  "model": "'"$MODEL"'",
  "messages": [{"role": "user", "content": "Name three rivers."}],
  "max_tokens": 48,
  "vllm_xargs": {"vtoken_enabled": false}
}'

echo "# a bad option is a 400 for that request alone"
ask "$URL/v1/completions" --header 'Content-Type: application/json' --data '{
  "model": "'"$MODEL"'", "prompt": "hello", "max_tokens": 4,
  "vllm_xargs": {"vtoken_polcy": "h2o"}
}'

echo "# the block pool and the running requests (a page for people is at $URL/vtoken)"
ask "$URL/vtoken/state" | cut -c 1-400

echo "# metrics"
ask "$URL/metrics" | grep '^vtoken_' | grep -v -e _bucket -e _created || echo "none: mode native"
