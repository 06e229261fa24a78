// Parquet files (https://github.com/apache/parquet-format): the texts of one column of strings, row by row. Needs no library
// except zlib, libzstd and libsnappy for pages that they compressed.
//   Thrift          the compact protocol of the footer and the headers of pages
//   RunReader       RLE/bit-packed hybrid: definition levels and indices into the dictionary
//   DeltaReader     DELTA_BINARY_PACKED: whole numbers, lengths of strings
//   ParquetColumn   the values of one column of a row group, page by page; only the page in hand and the dictionary are held
//   ParquetFile     the footer: which columns there are and where
// Read are columns at the top level (required or optional) and lists of structures (parquet_documents.h) in pages v1 and v2,
// plain, by dictionary, DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY. All else is refused by name. Every
// length is checked against the file, and the rows and bytes that come out of it against its size (budget.h): a run of 2^40
// equal values takes ten bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/budget.h"
#include "../base/check.h"
#include "../base/enum_table.h"
#include "../base/file.h"
#include "../base/text.h"
#include "document_source.h"

#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<snappy-c.h>)
#include <snappy-c.h>
#define HAVE_SNAPPY 1
#endif

namespace parquet {

// Thrown if the bytes are invalid; the file's reader adds its name.
struct Damage : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] inline void damaged(const std::string& what) { throw Damage(what); }

// ---- bytes -----------------------------------------------------------------------------------------------------------------
// Cuts the first n bytes off.
inline std::string_view take(std::string_view& bytes, uint64_t n) {
    if (n > bytes.size()) damaged("it is cut off");
    const std::string_view part = bytes.substr(0, (size_t)n);
    bytes.remove_prefix((size_t)n);
    return part;
}
template <class T>
T take_number(std::string_view& bytes) {
    T value;
    memcpy(&value, take(bytes, sizeof value).data(), sizeof value);  // little-endian
    return value;
}
inline uint64_t take_varint(std::string_view& bytes) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        const uint8_t byte = (uint8_t)take(bytes, 1)[0];
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return value;
    }
    damaged("a number has too many bytes");
}
inline int64_t take_zigzag(std::string_view& bytes) {
    const uint64_t n = take_varint(bytes);
    return (int64_t)(n >> 1) ^ -(int64_t)(n & 1);
}
// `width` bits from bit `at` on, the lowest first.
inline uint64_t bits_at(std::string_view bytes, uint64_t at, int width) {
    uint64_t value = 0;
    for (int done = 0; done < width;) {
        const uint64_t bit = at + (uint64_t)done;
        const int shift = (int)(bit % 8), n = std::min(8 - shift, width - done);
        value |= (uint64_t)(((uint8_t)bytes[(size_t)(bit / 8)] >> shift) & ((1 << n) - 1)) << done;
        done += n;
    }
    return value;
}

// ---- Thrift's compact protocol ----------------------------------------------------------------------------------------------
// Walks structures: fields() calls its argument with each field's number, and skips fields that it does not read.
class Thrift {
public:
    explicit Thrift(std::string_view bytes) : bytes_(bytes) {}
    std::string_view rest() const { return bytes_; }

    // field(number, type) returns true if it has read the field's value.
    template <class F>
    void fields(F field) {
        const Level level(*this);
        int number = 0;
        while (true) {
            const uint8_t head = (uint8_t)take(bytes_, 1)[0];
            if (head == 0) return;
            const int type = head & 15;
            number = head >> 4 ? number + (head >> 4) : (int)take_zigzag(bytes_);
            if (number < 0 || number > 32767) damaged("its footer has an invalid field");
            if (!field(number, type)) skip(type);
        }
    }
    // each() reads one element.
    template <class F>
    void list(F each) {
        for (uint64_t n = list_size().first; n > 0; n--) each();
    }
    int64_t integer(int type) {
        if (type == 3) return (int8_t)take(bytes_, 1)[0];
        if (type < 4 || type > 6) damaged("its footer has another type where a number should be");
        return take_zigzag(bytes_);
    }
    bool boolean(int type) const {
        if (type != 1 && type != 2) damaged("its footer has another type where a truth value should be");
        return type == 1;
    }
    std::string_view binary() { return take(bytes_, take_varint(bytes_)); }

private:
    struct Level {
        explicit Level(Thrift& t) : thrift(t) {
            if (++thrift.depth_ > 32) damaged("its footer is nested too deep");
        }
        ~Level() { thrift.depth_--; }
        Thrift& thrift;
    };
    // Number and type of a list's elements; each element has at least one byte.
    std::pair<uint64_t, int> list_size() {
        const uint8_t head = (uint8_t)take(bytes_, 1)[0];
        const uint64_t n = head >> 4 == 15 ? take_varint(bytes_) : head >> 4;
        if (n > bytes_.size()) damaged("its footer is cut off");
        return {n, head & 15};
    }
    void skip(int type) {
        const Level level(*this);
        if (type == 1 || type == 2) return;  // a truth value is encoded in its type
        if (type == 3) take(bytes_, 1);
        else if (type >= 4 && type <= 6) take_varint(bytes_);
        else if (type == 7) take(bytes_, 8);
        else if (type == 8) binary();
        else if (type == 9 || type == 10) {
            const auto [n, element] = list_size();
            for (uint64_t i = 0; i < n; i++) element <= 2 ? (void)take(bytes_, 1) : skip(element);
        } else if (type == 11) {
            const uint64_t n = take_varint(bytes_);
            if (n == 0) return;
            if (n > bytes_.size()) damaged("its footer is cut off");
            const uint8_t types = (uint8_t)take(bytes_, 1)[0];
            for (uint64_t i = 0; i < n; i++) {
                if (bytes_.empty()) damaged("its footer is cut off");
                for (const int element : {types >> 4, types & 15}) element <= 2 ? (void)take(bytes_, 1) : skip(element);
            }
        } else if (type == 12) fields([](int, int) { return false; });
        else damaged("its footer has a type that Thrift does not have");
    }

    std::string_view bytes_;
    int depth_ = 0;
};

// ---- encodings of numbers ---------------------------------------------------------------------------------------------------
class RunReader {
public:
    RunReader() = default;
    RunReader(std::string_view bytes, int width) : bytes_(bytes), width_(width) {
        if (width < 0 || width > 32) damaged("a width of bits is above 32");
    }
    uint32_t next() {
        while (left_ == 0) {
            const uint64_t head = take_varint(bytes_);
            packed_ = head & 1;
            left_ = packed_ ? (head >> 1) * 8 : head >> 1;
            at_ = 0;
            if (packed_) {
                // A file may end right after its last values.
                if (head >> 1 > std::numeric_limits<uint32_t>::max()) damaged("a run is too long");
                group_ = take(bytes_, std::min<uint64_t>((head >> 1) * (uint64_t)width_, bytes_.size()));
            } else {
                value_ = 0;
                const std::string_view bytes = take(bytes_, (uint64_t)(width_ + 7) / 8);
                for (size_t i = 0; i < bytes.size(); i++) value_ |= (uint32_t)(uint8_t)bytes[i] << 8 * i;
            }
        }
        left_--;
        if (!packed_) return value_;
        if ((at_ + (uint64_t)width_ + 7) / 8 > group_.size()) damaged("a run is cut off");
        const uint64_t at = at_;
        at_ += (uint64_t)width_;
        return (uint32_t)bits_at(group_, at, width_);
    }

private:
    std::string_view bytes_, group_;
    int width_ = 0;
    bool packed_ = false;
    uint64_t left_ = 0, at_ = 0;
    uint32_t value_ = 0;
};

class DeltaReader {
public:
    DeltaReader() = default;
    explicit DeltaReader(std::string_view bytes) : bytes_(bytes) {
        const uint64_t block = take_varint(bytes_), parts = take_varint(bytes_);
        count_ = take_varint(bytes_);
        last_ = take_zigzag(bytes_);
        if (parts == 0 || parts > 1024 || block == 0 || block > 1 << 20 || block % parts || block / parts % 8)
            damaged("blocks of numbers have impossible sizes");
        parts_ = (size_t)parts;
        part_values_ = block / parts;
    }
    uint64_t count() const { return count_; }
    int64_t next() {
        if (done_ == count_) damaged("there are fewer numbers than values");
        if (done_++ == 0) return last_;
        if (left_ == 0) begin_part();
        left_--;
        const uint64_t delta = bits_at(part_, at_, width_);
        at_ += (uint64_t)width_;
        last_ = (int64_t)((uint64_t)last_ + (uint64_t)min_delta_ + delta);
        return last_;
    }
    // The bytes after the last number.
    std::string_view behind() const {
        DeltaReader walk = *this;
        for (uint64_t left = count_ > 0 ? count_ - 1 : 0; left > 0; left -= std::min(left, part_values_)) walk.begin_part();
        return walk.bytes_;
    }

private:
    void begin_part() {
        if (part_index_ == widths_.size()) {
            min_delta_ = take_zigzag(bytes_);
            widths_ = take(bytes_, parts_);
            part_index_ = 0;
        }
        width_ = (uint8_t)widths_[part_index_++];
        if (width_ > 64) damaged("a width of bits is above 64");
        part_ = take(bytes_, part_values_ / 8 * (uint64_t)width_);
        left_ = part_values_;
        at_ = 0;
    }

    std::string_view bytes_, widths_, part_;
    uint64_t count_ = 0, done_ = 0, part_values_ = 0, left_ = 0, at_ = 0;
    size_t parts_ = 0, part_index_ = 0;
    int64_t last_ = 0, min_delta_ = 0;
    int width_ = 0;
};

// ---- contents of the footer ------------------------------------------------------------------------------------------------
enum Type : int { boolean, int32, int64, int96, float32, float64, byte_array, fixed_bytes, group };
inline const char* type_name(int type) {
    static constexpr const char* names[] = {"BOOLEAN", "INT32",  "INT64",      "INT96",
                                            "FLOAT",   "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"};
    static_assert(std::size(names) == number_of_values<Type>() - 1, "a name for each but the last, which is a nested column");
    return type >= boolean && type < group ? names[type] : "nested";
}
struct Column {
    std::string name;
    int type = group;
    bool optional = false, repeated = false;
    int definition = 0, repetition = 0;     // levels: of a value that is there; of lists around it
    bool no_sign = false, decimal = false;  // integers are unsigned; or must be divided by a power of ten
    int64_t children = 0;
};
// A column of lists: of values, or of structures of values.
struct ListColumn {
    std::string name;
    std::vector<Column> leaves;       // with their paths as names
    std::vector<std::string> fields;  // their names in a structure
    bool of_structures = false;
    int empty_definition = 0, element_definition = 0;  // levels: of a list without elements; of an element that is not null
};
// A column within a row group.
struct ColumnChunk {
    std::string name;  // of nested ones the path, its parts joined by NUL
    int type = -1;
    int64_t codec = 0, values = 0, begin = 0, dictionary = 0, bytes = 0;
    bool elsewhere = false;  // in another file
};
struct RowGroup {
    int64_t rows = 0;
    std::vector<ColumnChunk> columns;
};
struct PageHeader {
    int64_t type = -1, bytes = -1, packed_bytes = -1, values = -1, encoding = -1, level_encoding = 3;
    int64_t definition_bytes = 0, repetition_bytes = 0;
    std::optional<uint32_t> crc;
    bool packed = true;  // pages v2 may be uncompressed
};

inline ColumnChunk read_chunk(Thrift& t) {
    ColumnChunk c;
    int names = 0;
    t.fields([&](int number, int type) {
        if (number == 1) c.elsewhere = !t.binary().empty();
        else if (number == 3 && type == 12)
            t.fields([&](int n, int kind) {
                if (n == 1) c.type = (int)t.integer(kind);
                else if (n == 3)
                    t.list([&] {
                        if (names++ > 0) c.name += '\0';
                        c.name += t.binary();
                    });
                else if (n == 4) c.codec = t.integer(kind);
                else if (n == 5) c.values = t.integer(kind);
                else if (n == 7) c.bytes = t.integer(kind);
                else if (n == 9) c.begin = t.integer(kind);
                else if (n == 11) c.dictionary = t.integer(kind);
                else return false;
                return true;
            });
        else return false;
        return true;
    });
    return c;
}
inline RowGroup read_group(Thrift& t) {
    RowGroup g;
    t.fields([&](int number, int type) {
        if (number == 1) t.list([&] { g.columns.push_back(read_chunk(t)); });
        else if (number == 3) g.rows = t.integer(type);
        else return false;
        return true;
    });
    return g;
}
inline PageHeader read_page_header(Thrift& t) {
    PageHeader h;
    t.fields([&](int number, int type) {
        if (number == 1) h.type = t.integer(type);
        else if (number == 2) h.bytes = t.integer(type);
        else if (number == 3) h.packed_bytes = t.integer(type);
        else if (number == 4) h.crc = (uint32_t)t.integer(type);
        else if ((number == 5 || number == 7) && type == 12)  // pages v1, dictionaries
            t.fields([&](int n, int kind) {
                if (n == 1) h.values = t.integer(kind);
                else if (n == 2) h.encoding = t.integer(kind);
                else if (n == 3 && number == 5) h.level_encoding = t.integer(kind);
                else return false;
                return true;
            });
        else if (number == 8 && type == 12)  // pages v2
            t.fields([&](int n, int kind) {
                if (n == 1) h.values = t.integer(kind);
                else if (n == 4) h.encoding = t.integer(kind);
                else if (n == 5) h.definition_bytes = t.integer(kind);
                else if (n == 6) h.repetition_bytes = t.integer(kind);
                else if (n == 7) h.packed = t.boolean(kind);
                else return false;
                return true;
            });
        else return false;
        return true;
    });
    return h;
}

// ---- pages ------------------------------------------------------------------------------------------------------------------
inline const char* codec_name(int64_t codec) {
    static constexpr const char* names[] = {"no", "snappy", "gzip", "LZO", "brotli", "LZ4", "zstd", "LZ4"};
    return codec >= 0 && codec <= 7 ? names[codec] : "an unknown";
}
inline bool reads_codec(int64_t codec) {
    bool reads = codec == 0;
#ifdef HAVE_SNAPPY
    reads |= codec == 1;
#endif
#ifdef HAVE_ZLIB
    reads |= codec == 2;
#endif
#ifdef HAVE_ZSTD
    reads |= codec == 6;
#endif
    return reads;
}
// Decompresses to exactly `size` bytes. Impossible sizes are refused before memory is allocated.
inline void unpack(int64_t codec, std::string_view packed, size_t size, std::string& out) {
    bool whole = false;
    if (codec == 0) {
        whole = packed.size() == size;
        if (whole) out.assign(packed);
    }
#ifdef HAVE_SNAPPY
    if (codec == 1) {
        size_t n = 0;
        whole = snappy_uncompressed_length(packed.data(), packed.size(), &n) == SNAPPY_OK && n == size;
        if (whole) out.resize(size);
        whole = whole && snappy_uncompress(packed.data(), packed.size(), out.data(), &n) == SNAPPY_OK && n == size;
    }
#endif
#ifdef HAVE_ZLIB
    if (codec == 2 && size / 1100 <= packed.size()) {  // one byte becomes at most 1032
        out.resize(size);
        z_stream z{};
        CHECK(inflateInit2(&z, 15 + 32) == Z_OK, "no memory for zlib");
        z.next_in = (const Bytef*)packed.data();
        z.avail_in = (uInt)packed.size();
        z.next_out = (Bytef*)out.data();
        z.avail_out = (uInt)size;
        whole = inflate(&z, Z_FINISH) == Z_STREAM_END && z.avail_out == 0;
        inflateEnd(&z);
    }
#endif
#ifdef HAVE_ZSTD
    if (codec == 6) {
        const unsigned long long said = ZSTD_getFrameContentSize(packed.data(), packed.size());
        whole = said == size || said == ZSTD_CONTENTSIZE_UNKNOWN;
        if (whole) out.resize(size);
        whole = whole && ZSTD_decompress(out.data(), size, packed.data(), packed.size()) == size;
    }
#endif
    if (!whole) damaged(format("a page of %s compression cannot be unpacked", codec_name(codec)));
}

// A value: bytes for strings, else a number.
struct Value {
    bool null = false;
    int definition = 0, repetition = 0;
    std::string_view bytes;
    int64_t number = 0;
    double real = 0;
};

class ParquetColumn {
public:
    // output: what may come out of the file.
    ParquetColumn(std::string_view file, const Column& column, const ColumnChunk& chunk, Budget& output)
        : column_(column), chunk_(chunk), output_(&output) {
        const int64_t begin = chunk.dictionary > 0 ? std::min(chunk.dictionary, chunk.begin) : chunk.begin;
        if (chunk.elsewhere) damaged(format("column '%s' is in another file", column.name.c_str()));
        if (chunk.type != column.type) damaged(format("column '%s' has two types", column.name.c_str()));
        if (begin < 4 || chunk.bytes < 0 || begin > (int64_t)file.size() || chunk.bytes > (int64_t)file.size() - begin)
            damaged(format("column '%s' lies outside the file", column.name.c_str()));
        if (!reads_codec(chunk.codec))
            damaged(format("column '%s' has %s compression, which this build does not read", column.name.c_str(),
                           codec_name(chunk.codec)));
        file_ = file;
        bytes_ = file.substr((size_t)begin, (size_t)chunk.bytes);
    }
    int64_t values_left() const { return chunk_.values - done_; }
    // The position in the file of the first unread page.
    int64_t position() const { return bytes_.data() - file_.data(); }

    // The next row's value, valid until the next call.
    Value next() {
        while (left_ == 0) next_page();
        left_--;
        done_++;
        Value v;
        if (column_.repetition > 0) v.repetition = (int)repetitions_.next();
        if (column_.definition > 0) v.definition = (int)definitions_.next();
        v.null = v.definition < column_.definition;
        if (!v.null) read_value(v);
        spend(v.bytes.size());
        return v;
    }

private:
    void spend(uint64_t bytes) {
        if (!output_->spend(bytes, file_.size()))
            damaged(format("more than %s come out of its %s, which no text does",
                           human_bytes((double)output_->allowed(file_.size())).c_str(),
                           counted((int64_t)file_.size(), "byte").c_str()));
    }
    static constexpr int64_t most_page_bytes = 512 << 20, most_dictionary_bytes = 64 << 20;

    void next_page() {
        if (bytes_.empty()) damaged(format("column '%s' has fewer values than rows", column_.name.c_str()));
        Thrift thrift(bytes_);
        const PageHeader h = read_page_header(thrift);
        bytes_ = thrift.rest();
        if (h.packed_bytes < 0 || h.bytes < 0) damaged("a page has no size");
        if (h.bytes > most_page_bytes)
            damaged(format("column '%s' has a page of %s; at most 512 MiB are read", column_.name.c_str(),
                           human_bytes((double)h.bytes).c_str()));
        std::string_view packed = take(bytes_, (uint64_t)h.packed_bytes);
#ifdef HAVE_ZLIB
        if (h.crc && crc32(0, (const Bytef*)packed.data(), (uInt)packed.size()) != *h.crc)
            damaged(format("a page of column '%s' has a wrong checksum", column_.name.c_str()));
#endif
        if (h.type == 1) return;  // an index
        if (h.type != 0 && h.type != 2 && h.type != 3) damaged("a page has an unknown kind");
        if (h.values < 0) damaged("a page has no values");
        if (h.type == 2) {
            if (h.bytes > most_dictionary_bytes) damaged("a dictionary has more than 64 MiB");
            unpack_page(h, packed, (size_t)h.bytes, dictionary_bytes_);
            read_dictionary(h);
            return;
        }
        std::string_view repetitions, definitions;
        if (h.type == 3) {
            if (h.definition_bytes < 0 || h.repetition_bytes < 0 || h.definition_bytes > h.bytes ||
                h.repetition_bytes > h.bytes - h.definition_bytes)
                damaged("a page's levels are longer than it");
            repetitions = take(packed, (uint64_t)h.repetition_bytes);
            definitions = take(packed, (uint64_t)h.definition_bytes);
            unpack_page(h, packed, (size_t)(h.bytes - h.definition_bytes - h.repetition_bytes), page_);
            values_ = page_;
        } else {
            unpack_page(h, packed, (size_t)h.bytes, page_);
            values_ = page_;
            if ((column_.definition > 0 || column_.repetition > 0) && h.level_encoding != 3)
                damaged("a page has levels of an old kind (BIT_PACKED)");
            if (column_.repetition > 0) repetitions = take(values_, take_number<uint32_t>(values_));
            if (column_.definition > 0) definitions = take(values_, take_number<uint32_t>(values_));
        }
        // Levels of pages v2 are in the file, levels of v1 in page_: both are valid while the page is read.
        const auto bits = [](int level) { return level > 0 ? 32 - __builtin_clz((unsigned)level) : 0; };
        repetitions_ = RunReader(repetitions, bits(column_.repetition));
        definitions_ = RunReader(definitions, bits(column_.definition));
        left_ = (uint64_t)h.values;
        begin_values(h.encoding);
    }
    void unpack_page(const PageHeader& h, std::string_view packed, size_t size, std::string& out) {
        spend(size);
        if (size > 0) unpack(h.packed ? chunk_.codec : 0, packed, size, out);
        else out.clear();
    }

    void read_dictionary(const PageHeader& h) {
        if (h.encoding != 0 && h.encoding != 2) damaged("a dictionary is not plain");
        if (column_.type == boolean) damaged("a dictionary has truth values");
        if (h.values > (int64_t)dictionary_bytes_.size()) damaged("a dictionary has more values than bytes");
        dictionary_.clear();
        values_ = dictionary_bytes_;
        encoding_ = Plain;
        for (int64_t i = 0; i < h.values; i++) {
            Value v;
            read_plain(v);  // ends where the bytes end
            dictionary_.push_back(v);
        }
    }

    void begin_values(int64_t encoding) {
        const bool text = column_.type == byte_array;
        if (encoding == 0) encoding_ = Plain;
        else if (encoding == 2 || encoding == 8) {
            encoding_ = Indices;
            // A page that contains only nulls has no width.
            indices_ = values_.empty() ? RunReader() : RunReader(values_.substr(1), (uint8_t)values_[0]);
        } else if (encoding == 3 && column_.type == boolean) {
            encoding_ = Runs;
            const uint32_t bytes = take_number<uint32_t>(values_);
            indices_ = RunReader(take(values_, bytes), 1);
        } else if (encoding == 5 && (column_.type == int32 || column_.type == int64)) {
            encoding_ = Deltas;
            lengths_ = DeltaReader(values_);
        } else if (encoding == 6 && text) {
            encoding_ = Lengths;
            lengths_ = DeltaReader(values_);
            values_ = lengths_.behind();
        } else if (encoding == 7 && text) {
            encoding_ = Prefixes;
            prefixes_ = DeltaReader(values_);
            lengths_ = DeltaReader(prefixes_.behind());
            values_ = lengths_.behind();
            last_.clear();
        } else damaged(format("column '%s' has encoding %lld, which is not read", column_.name.c_str(), (long long)encoding));
        bit_ = 0;
    }

    void read_value(Value& v) {
        switch (encoding_) {
            case Plain: read_plain(v); return;
            case Indices: {
                const uint32_t i = indices_.next();
                if (i >= dictionary_.size()) damaged("an index is outside the dictionary");
                v.bytes = dictionary_[i].bytes;
                v.number = dictionary_[i].number;
                v.real = dictionary_[i].real;
                return;
            }
            case Runs: v.number = indices_.next(); return;
            case Deltas: v.number = lengths_.next(); return;
            case Lengths: v.bytes = take(values_, length(lengths_)); return;
            case Prefixes: {
                const uint64_t prefix = length(prefixes_);
                if (prefix > last_.size()) damaged("a prefix is longer than the value before");
                last_.resize((size_t)prefix);
                last_ += take(values_, length(lengths_));
                if (last_.size() > (size_t)most_page_bytes) damaged("a value is longer than 512 MiB");
                v.bytes = last_;
                return;
            }
        }
    }
    static uint64_t length(DeltaReader& lengths) {
        const int64_t n = lengths.next();
        if (n < 0) damaged("a length is negative");
        return (uint64_t)n;
    }
    void read_plain(Value& v) {
        switch (column_.type) {
            case boolean:
                if (bit_ / 8 >= values_.size()) damaged("it is cut off");
                v.number = (int64_t)bits_at(values_, bit_++, 1);
                return;
            case int32: v.number = take_number<int32_t>(values_); return;
            case int64: v.number = take_number<int64_t>(values_); return;
            case float32: v.real = take_number<float>(values_); return;
            case float64: v.real = take_number<double>(values_); return;
            default: v.bytes = take(values_, take_number<uint32_t>(values_));
        }
    }

    enum Encoding { Plain, Indices, Runs, Deltas, Lengths, Prefixes };
    Column column_;
    ColumnChunk chunk_;
    Budget* output_;
    std::string_view file_, bytes_;        // the file, and its unread pages
    std::string page_, dictionary_bytes_;  // unpacked
    std::string_view values_;              // the page's unread values
    std::vector<Value> dictionary_;
    Encoding encoding_ = Plain;
    RunReader repetitions_, definitions_, indices_;
    DeltaReader lengths_, prefixes_;
    std::string last_;
    uint64_t left_ = 0, bit_ = 0;
    int64_t done_ = 0;
};

// ---- the file ---------------------------------------------------------------------------------------------------------------
class ParquetFile {
public:
    explicit ParquetFile(std::string_view file) : file_(file) {
        if (file.size() < 12) damaged("it is cut off");
        if (file.substr(file.size() - 4) != parquet_magic) damaged("it is cut off: the footer at its end is missing");
        std::string_view end = file.substr(file.size() - 8);
        const uint32_t footer = take_number<uint32_t>(end);
        if (footer > file.size() - 12) damaged("its footer is longer than the file");
        file_.remove_suffix(8 + (size_t)footer);
        Thrift t(file.substr(file_.size(), footer));
        std::vector<Column> schema;
        t.fields([&](int number, int) {
            if (number == 2) t.list([&] { schema.push_back(read_column(t)); });
            else if (number == 4) t.list([&] { groups.push_back(read_group(t)); });
            else return false;
            return true;
        });
        // The schema is a tree in depth-first order; below the root, each tree is a column.
        for (size_t i = 1; i < schema.size(); i++) {
            columns.push_back(schema[i]);
            read_list(schema, i);
            for (int64_t below = schema[i].children; below > 0 && i + 1 < schema.size(); below--) below += schema[++i].children;
        }
        Budget rows = row_budget;
        for (const RowGroup& group : groups) {
            if (group.rows < 0) damaged("a row group has a negative number of rows");
            if (!rows.spend((uint64_t)group.rows, file.size()))
                damaged(format("it says that its %s hold more than %s rows, which no text does",
                               counted((int64_t)file.size(), "byte").c_str(),
                               with_commas((int64_t)rows.allowed(file.size())).c_str()));
        }
    }

    // The columns of a row group, in this order.
    std::vector<ParquetColumn> open(const RowGroup& group, const std::vector<const Column*>& wanted) {
        std::unordered_map<std::string_view, const ColumnChunk*> chunks;
        for (const ColumnChunk& chunk : group.columns) chunks.emplace(chunk.name, &chunk);
        std::vector<ParquetColumn> opened;
        for (const Column* column : wanted) {
            const auto found = chunks.find(column->name);
            if (found == chunks.end()) damaged(format("a row group has no column '%s'", column->name.c_str()));
            const int64_t values = found->second->values;
            if (column->repetition == 0 ? values != group.rows : values < group.rows)
                damaged(format("column '%s' has not one value per row", column->name.c_str()));
            if (column->repetition > 0 && !values_.spend((uint64_t)values, file_.size()))
                damaged(format("column '%s' has more values than a file of its size can hold", column->name.c_str()));
            opened.emplace_back(file_, *column, *found->second, output_);
        }
        return opened;
    }

    std::vector<Column> columns;    // of the top level
    std::vector<ListColumn> lists;  // columns that are lists of values, or of structures of values
    std::vector<RowGroup> groups;

private:
    static Column read_column(Thrift& t) {
        Column c;
        t.fields([&](int number, int type) {
            if (number == 1) c.type = (int)t.integer(type);
            else if (number == 3) {
                const int64_t repetition = t.integer(type);
                c.optional = repetition == 1;
                c.repeated = repetition == 2;
                c.definition = c.optional;
            } else if (number == 4) c.name = t.binary();
            else if (number == 5) {
                c.children = t.integer(type);
                if (c.children < 0 || c.children > 1 << 20) damaged("its schema is not a tree");
                if (c.children > 0) c.type = group;
            } else if (number == 6) {  // ConvertedType
                const int64_t meaning = t.integer(type);
                c.decimal = meaning == 5;
                c.no_sign = meaning >= 11 && meaning <= 14;
            } else return false;
            return true;
        });
        return c;
    }
    // A tree of the schema that is a list: optional group / repeated group / element, or without the element (two levels, as
    // older writers have it). Others are not lists.
    void read_list(const std::vector<Column>& schema, size_t i) {
        const auto there = [&](size_t k) { return k < schema.size(); };
        if (schema[i].children != 1 || schema[i].repeated || !there(i + 1) || !schema[i + 1].repeated) return;
        ListColumn list;
        list.name = schema[i].name;
        list.empty_definition = schema[i].definition;
        size_t element = i + 1;
        int definition = schema[i].definition + 1;
        std::string path = schema[i].name + '\0' + schema[i + 1].name;
        if (schema[element].children == 1 && there(i + 2) && !schema[i + 2].repeated) {
            element = i + 2;
            definition += schema[element].optional;
            path += '\0' + schema[element].name;
        }
        list.element_definition = definition;
        const auto add = [&](Column leaf, const std::string& leaf_path, int level) {
            list.fields.push_back(leaf.name);
            leaf.name = leaf_path;
            leaf.definition = level;
            leaf.repetition = 1;
            list.leaves.push_back(std::move(leaf));
        };
        const int64_t fields = schema[element].children;
        list.of_structures = fields > 0;
        if (fields == 0) add(schema[element], path, definition);
        for (int64_t k = 0; k < fields; k++) {
            const size_t at = element + 1 + (size_t)k;
            if (!there(at) || schema[at].children > 0 || schema[at].repeated) return;
            add(schema[at], path + '\0' + schema[at].name, definition + schema[at].optional);
        }
        for (const Column& leaf : list.leaves)
            if (leaf.type == int96 || leaf.type >= fixed_bytes || leaf.type < 0 || leaf.decimal) return;
        lists.push_back(std::move(list));
    }

    std::string_view file_;  // without the footer
    Budget output_ = output_budget, values_ = row_budget;
};

}  // namespace parquet
