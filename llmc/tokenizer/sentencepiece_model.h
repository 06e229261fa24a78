// SentencePiece's .model files (Kudo and Richardson, 2018): a protobuf message with the pieces, their scores and kinds, the
// table of the normalizer, and the training options. Reads only the few fields that encoding and decoding depend on, by number,
// from sentencepiece_model.proto.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "../base/check.h"

struct SentencePieceModel {
    enum Kind { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };
    enum Type { unigram = 1, bpe = 2, words = 3, characters = 4 };
    struct Piece {
        std::string text;
        float score = 0;
        int kind = normal;
    };
    std::vector<Piece> pieces;
    int type = unigram;
    bool byte_fallback = false, whitespace_as_suffix = false;
    std::string bos = "<s>", eos = "</s>", unknown_surface = " \u2047 ";
    std::string charsmap;
    bool dummy_prefix = true, drops_extra_spaces = true, escapes_spaces = true;
    bool denormalizes = false;
};

// The fields of a protobuf message, in order.
class ProtobufFields {
public:
    ProtobufFields(std::string_view bytes, const std::string& file) : rest_(bytes), file_(file) {}

    int number = 0;
    uint64_t value = 0;      // of a number
    std::string_view bytes;  // of a text or message

    bool next() {
        if (rest_.empty()) return false;
        const uint64_t tag = variable();
        number = (int)(tag >> 3 & 0x1fffffff);
        wire_ = (int)(tag & 7);
        bytes = {};
        value = 0;
        if (number == 0) damaged();
        if (wire_ == 0) {
            value = variable();
        } else if (wire_ == 1 || wire_ == 5) {
            bytes = take(wire_ == 1 ? 8 : 4);
        } else if (wire_ == 2) {
            bytes = take(variable());
        } else {
            damaged();
        }
        return true;
    }
    int as_int() const {
        check_wire(0);
        return (int)std::min<uint64_t>(value, INT32_MAX);
    }
    bool as_bool() const {
        check_wire(0);
        return value != 0;
    }
    std::string as_text() const { return std::string(as_message()); }
    std::string_view as_message() const {
        check_wire(2);
        return bytes;
    }
    float as_float() const {
        check_wire(5);
        float f;
        memcpy(&f, bytes.data(), 4);
        return f;
    }

private:
    [[noreturn]] void damaged() const { fail("%s is not a SentencePiece model, or it is damaged", file_.c_str()); }
    void check_wire(int wire) const {
        if (wire_ != wire) damaged();
    }
    std::string_view take(uint64_t n) {
        if (n > rest_.size()) damaged();
        const std::string_view taken = rest_.substr(0, n);
        rest_.remove_prefix(n);
        return taken;
    }
    uint64_t variable() {
        uint64_t result = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const auto b = (unsigned char)take(1)[0];
            result |= (uint64_t)(b & 127) << shift;
            if (b < 128) return result;
        }
        damaged();
    }

    std::string_view rest_;
    const std::string& file_;
    int wire_ = 0;
};

inline SentencePieceModel read_sentencepiece_model(std::string_view bytes, const std::string& file) {
    SentencePieceModel m;
    constexpr size_t most_pieces = 10000000;
    for (ProtobufFields field(bytes, file); field.next();) {
        if (field.number == 1) {
            SentencePieceModel::Piece piece;
            for (ProtobufFields f(field.as_message(), file); f.next();)
                if (f.number == 1) piece.text = f.as_text();
                else if (f.number == 2) piece.score = f.as_float();
                else if (f.number == 3) piece.kind = f.as_int();
            if (m.pieces.size() >= most_pieces) fail("%s has more than %zu pieces", file.c_str(), most_pieces);
            m.pieces.push_back(std::move(piece));
        } else if (field.number == 2) {
            for (ProtobufFields f(field.as_message(), file); f.next();)
                if (f.number == 3) m.type = f.as_int();
                else if (f.number == 24) m.whitespace_as_suffix = f.as_bool();
                else if (f.number == 35) m.byte_fallback = f.as_bool();
                else if (f.number == 44) m.unknown_surface = f.as_text();
                else if (f.number == 46) m.bos = f.as_text();
                else if (f.number == 47) m.eos = f.as_text();
        } else if (field.number == 3) {
            for (ProtobufFields f(field.as_message(), file); f.next();)
                if (f.number == 2) m.charsmap = f.as_text();
                else if (f.number == 3) m.dummy_prefix = f.as_bool();
                else if (f.number == 4) m.drops_extra_spaces = f.as_bool();
                else if (f.number == 5) m.escapes_spaces = f.as_bool();
        } else if (field.number == 5) {
            for (ProtobufFields f(field.as_message(), file); f.next();) m.denormalizes |= f.number == 2 && !f.as_text().empty();
        }
    }
    if (m.pieces.empty()) fail("%s is not a SentencePiece model: it has no pieces", file.c_str());
    return m;
}
