#!/usr/bin/env python3
"""Texts in 24 languages from Debian's packages, to train `train_gpt curate --train-language`.

    dev/data/language_texts.py --output language_texts        # 125 MB of packages, 2 minutes, no root needed
    train_gpt curate --train-language language_texts/train --output languages.model
    train_gpt curate --language-model languages.model --measure-on language_texts/held_out

Writes OUTPUT/SET/LANGUAGE.txt with one paragraph per line:
    train       help of LibreOffice, manual pages
    held_out    help of GNOME (for Turkish, where it has little: manual pages)
    fortunes    sayings and jokes: texts about anything except software, in nine languages
The sets are split by package, so that no document is in two of them. `other` has texts in 20 more languages; 12 of these
are only in GNOME's help, half of whose pages are held out. Markup is removed. A repeated paragraph is kept once. A
paragraph in several languages is untranslated: it is kept for English if it occurs there and has 40 characters or more, and
dropped from the others. Packages are kept in OUTPUT/packages and are not downloaded again.
"""
import argparse
import gzip
import hashlib
import html
import os
import re
import subprocess
import sys
import tarfile

# Language: its folders in LibreOffice's help, in the manual pages and in GNOME's help ("": none, or unusable).
LANGUAGES = {
    "ca": ("ca", "", "ca"),
    "cs": ("cs", "cs", "cs"),
    "da": ("da", "da", "da"),
    "de": ("de", "de", "de"),
    "el": ("el", "el", "el"),
    "en": ("en-us", "en", "C"),
    "es": ("es", "es", "es"),
    "fi": ("fi", "fi", "fi"),
    "fr": ("fr", "fr", "fr"),
    "hi": ("hi", "", "hi"),
    "hu": ("hu", "hu", "hu"),
    "id": ("id", "id", "id"),
    "it": ("it", "it", "it"),
    "ja": ("ja", "ja", "ja"),
    "ko": ("ko", "", "ko"),
    "nl": ("nl", "nl", "nl"),
    "pl": ("pl", "pl", "pl"),
    "pt": ("pt", "pt-br", "pt_BR"),
    "ru": ("ru", "ru", "ru"),
    "sv": ("sv", "sv", "sv"),
    "tr": ("tr", "tr", ""),
    "uk": ("", "uk", "uk"),
    "vi": ("vi", "vi", "vi"),
    "zh": ("zh-cn", "zh", "zh_CN"),
}
# Languages not distinguished from each other, as `other`: without them every text would be classified as one of the above.
OTHERS = {
    "office": ("et", "eu", "gl", "sl"),
    "pages": ("mk", "nb", "ro", "sr"),
    "gnome": ("as", "fa", "gu", "he", "hr", "kn", "lt", "lv", "mr", "pa", "ta", "te"),  # half of their pages are held out
    "gnome held out": ("gl", "ro", "sl", "sr"),
}
FORTUNES = {"cs": "cs", "de": "de", "en": "", "es": "es", "it": "it", "pl": "pl", "pt": "br", "ru": "ru", "zh": "zh"}


def packages():
    """Yields (set, language, package, reader, pattern of the files' names)."""
    for language, (office, pages, gnome) in LANGUAGES.items():
        if office:
            yield "train", language, f"libreoffice-help-{office}", office_help, r"/text/.*\.html$"
        held_out = "" if gnome else "held_out"
        if pages:
            for package in ("manpages", "manpages-dev") if pages == "en" else (f"manpages-{pages}",):
                folder = "man" if pages == "en" else r"man/[^/]*"
                yield held_out or "train", language, package, manual_page, rf"/{folder}/man\d/[^/]*\.gz$"
        if gnome:
            yield "held_out", language, "gnome-user-docs", gnome_help, rf"/help/{gnome}/.*\.page$"
    for code in OTHERS["office"]:
        yield "train", "other", f"libreoffice-help-{code}", office_help, r"/text/.*\.html$"
    for code in OTHERS["pages"]:
        yield "train", "other", f"manpages-{code}", manual_page, r"/man/[^/]*/man\d/[^/]*\.gz$"
    for code in OTHERS["gnome"]:
        yield "train", "other", "gnome-user-docs", gnome_help, rf"/help/{code}/.*/[a-m][^/]*\.page$"
        yield "held_out", "other", "gnome-user-docs", gnome_help, rf"/help/{code}/.*/[n-z][^/]*\.page$"
    for code in OTHERS["gnome held out"]:
        yield "held_out", "other", "gnome-user-docs", gnome_help, rf"/help/{code}/.*\.page$"
    for language, code in FORTUNES.items():
        package = f"fortunes-{code}" if code else "fortunes"
        yield "fortunes", language, package, fortunes, r"/games/fortunes/((?!off)[^/]*/)?[^/.]*(\.fortunes)?$"


# ---- from a file to its paragraphs -----------------------------------------------------------------------------------------


def without_tags(text):
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def office_help(text):
    for attributes, inner in re.findall(r"<(?:p|h\d)\b([^>]*)>(.*?)</(?:p|h\d)>", text, re.S):
        if "code" not in attributes:
            yield without_tags(inner)


def gnome_help(text):
    for _, inner in re.findall(r"<(p|title|desc)\b[^>]*>(.*?)</\1>", text, re.S):
        yield without_tags(inner)


ROFF_CHARACTERS = {"aq": "'", "dq": '"', "co": "©", "bu": "", "em": "-", "en": "-", "hy": "-", "lq": '"', "rq": '"', "oq": "'",
                   "cq": "'", "ti": "~", "ha": "^", "rs": "\\", "Fo": "«", "Fc": "»", "Bq": "„", "ga": "`"}


def roff_text(line):
    """A line of a manual page without its escapes: fonts, sizes, named characters."""
    line = re.sub(r'\\["#].*', "", line)
    line = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\s[-+]?\d+|\\[&|^%/,:!cdu]|\\[hvwm](\[[^]]*\]|'[^']*')", "", line)
    line = re.sub(r"\\\[u([0-9A-F]{4,5})\]", lambda m: chr(int(m.group(1), 16)), line)
    line = re.sub(r"\\\((..)|\\\[([^]]*)\]", lambda m: ROFF_CHARACTERS.get(m.group(1) or m.group(2), " "), line)
    return re.sub(r"\\(.)", lambda m: {"e": "\\", "-": "-", "~": " ", " ": " ", "0": " ", "'": "'"}.get(m.group(1), ""), line)


def manual_page(text):
    paragraph, code = [], False
    for line in text.split("\n"):
        macro = re.match(r"[.']\s*(\w+)?(.*)", line)
        if not macro:
            if not code:
                paragraph.append(roff_text(line))
            continue
        name, rest = macro.group(1) or "", macro.group(2)
        if name in ("nf", "EX", "TS"):
            code = True
        elif name in ("fi", "EE", "TE"):
            code = False
        if name in ("B", "I", "R", "SM", "SB", "BI", "BR", "IB", "IR", "RB", "RI"):
            words = re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)
            separator = "" if len(name) == 2 and name != "SM" and name != "SB" else " "
            paragraph.append(roff_text(separator.join(a or b for a, b in words)))
        elif name:
            yield " ".join(paragraph)
            paragraph = []
            if name in ("SH", "SS"):
                yield roff_text(rest).replace('"', "")
    yield " ".join(paragraph)


def fortunes(text):
    return re.split(r"(?m)^%+$", re.sub(r"\x1b\[[0-9;]*m", "", text))


# ---- from packages to sets -------------------------------------------------------------------------------------------------


def download(folder, names):
    """Downloads packages that are not yet in the folder; returns each one's file."""
    os.makedirs(folder, exist_ok=True)

    def here():
        return {file.split("_")[0]: os.path.join(folder, file) for file in os.listdir(folder) if file.endswith(".deb")}

    missing = [name for name in names if name not in here()]
    if missing:
        print(f"downloading {len(missing)} packages into {folder}", file=sys.stderr)
        done = subprocess.run(["apt-get", "download", "-qq", *missing], cwd=folder, check=False)
        missing = [name for name in names if name not in here()]
        if done.returncode or missing:
            sys.exit(f"error: apt-get download failed; missing: {' '.join(missing)}; HINT: apt-get update as root, once")
    return here()


def read_package(file, jobs):
    """Yields (job, text) for each of the package's files that matches a job's pattern. Unpacks nothing to the disk."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            for member in tar:
                job = next((job for job in jobs if member.isfile() and re.search(job[4], member.name)), None)
                if not job:
                    continue
                data = tar.extractfile(member).read()
                try:
                    yield job, (gzip.decompress(data) if member.name.endswith(".gz") else data).decode("utf-8")
                except (UnicodeDecodeError, OSError):
                    pass  # an old encoding, or a file that only refers to another one
        process.stdout.read()


SCRIPTS = {"el": "\u0370-\u03ff", "hi": "\u0900-\u097f", "ja": "\u3040-\u30ff\u4e00-\u9fff", "ko": "\uac00-\ud7af",
           "ru": "\u0400-\u04ff", "uk": "\u0400-\u04ff", "zh": "\u4e00-\u9fff"}
ENGLISH = {"the", "and", "with", "this", "that", "which", "are", "from", "for", "you", "be", "by", "not", "it", "or", "as"}


def is_prose(paragraph, language):
    """At least 8 letters (3 if letters are syllables or words), hardly anything else except blanks, and not left in English."""
    letters = sum(c.isalpha() or "\u0900" <= c <= "\u0dff" for c in paragraph)
    wide = sum("\u0e00" <= c for c in paragraph)
    if letters + 2 * wide < 8 or letters < 0.7 * len(re.sub(r"\s", "", paragraph)):
        return False
    if language in SCRIPTS:
        return len(re.findall(f"[{SCRIPTS[language]}]", paragraph)) >= 0.4 * letters
    words = paragraph.lower().split()
    return language == "en" or sum(word in ENGLISH for word in words) < 0.15 * len(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="folder for the texts and the packages")
    parser.add_argument("--most", type=float, default=4, help="MB of each language in a set, drawn evenly; default 4")
    options = parser.parse_args()

    jobs = list(packages())
    files = download(os.path.join(options.output, "packages"), sorted({job[2] for job in jobs}))
    found = {}  # paragraph: its set, for each language
    for package in sorted({job[2] for job in jobs}):
        for (name, language, _, reader, _), text in read_package(files[package], [job for job in jobs if job[2] == package]):
            for paragraph in reader(text):
                paragraph = " ".join(paragraph.split())
                if is_prose(paragraph, language):
                    of = found.setdefault(paragraph, {})
                    of[language] = "train" if "train" in (name, of.get(language)) else name

    sets = {}
    for paragraph, of in found.items():
        language = "en" if "en" in of else next(iter(of))
        if len(of) == 1 or (language == "en" and len(paragraph) >= 40):
            sets.setdefault((of[language], language), []).append(paragraph)
    for (name, language), paragraphs in sorted(sets.items()):
        paragraphs.sort(key=lambda text: hashlib.sha256(text.encode()).digest())  # an arbitrary but fixed order
        kept, size = [], 0
        for paragraph in paragraphs:
            size += len(paragraph.encode()) + 1
            if size > options.most * 1e6:
                break
            kept.append(paragraph)
        path = os.path.join(options.output, name, language + ".txt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".tmp", "w", encoding="utf-8") as out:
            out.write("".join(paragraph + "\n" for paragraph in kept))
        os.replace(path + ".tmp", path)
        print(f"{path}: {len(kept):,} paragraphs, {os.path.getsize(path) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
