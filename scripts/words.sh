# shellcheck shell=bash
# Lists of names in one variable, such as DATA, TEXT and EXTRA.

# split_words TEXT: sets `words`. Words are separated by blanks; a word that contains blanks must be quoted: 'a b' "c d" e.
# A text that is the name of a file, or the prefix of one, is one word.
split_words() {
    local lines
    words=()
    if [[ $1 =~ ^[[:space:]]*$ ]]; then
        return
    elif [[ $1 == *[[:space:]]* ]] && compgen -G "$(printf '%q' "$1")*" >/dev/null; then
        words=("$1")
    elif lines=$(xargs printf '%s\n' <<<"$1" 2>/dev/null); then
        mapfile -t words <<<"$lines"
    else
        read -ra words <<<"$1" # an unclosed quote is a character
    fi
}
