// train_gpt serve: a model behind OpenAI's HTTP API (completions.h) and a page that uses it (serve_page.h), by cpp-httplib.
// Threads of the HTTP server read requests, queue them and send the results; one thread, the caller's, runs the model, one step
// for all sequences at a time (model/decoder.h). A request whose client has disconnected is dropped.
#pragma once
#include "../base/check.h"
#include "../options/options.h"

#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<httplib.h>)
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <ctime>
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "../base/terminal.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "../model/decoder.h"
#include "completions.h"
#include "http_server.h"
#include "inference.h"
#include "json_prefix.h"
#include "serve_page.h"

inline void check_serving() {}

namespace detail {

inline std::atomic<bool> asked_to_end{false};  // set by SIGINT, SIGTERM and SIGHUP

using ServeClock = std::chrono::steady_clock;

// The completions of one request, shared by the model's thread and the one that answers.
struct ServedRequest {
    struct Choice {
        StoppingText text;
        std::string end;  // "stop" or "length"; empty: in progress
        std::optional<TokenLogprobs> logprobs{};
        JsonPrefix json{};                 // with response_format json_object
        bool begun = false, told = false;  // in a stream: the first data were sent, the end was sent
    };
    CompletionRequest asked;
    CompletionAnswer answer;
    std::vector<Choice> choices;
    ServeClock::time_point deadline;
    std::atomic<bool> gone{false};  // the client has disconnected
    // The other members are protected by `mutex`.
    std::mutex mutex;
    std::condition_variable changed;
    bool begun = false;
    int64_t written = 0;  // tokens

    bool wanted() const { return !gone && !asked_to_end && ServeClock::now() < deadline; }
    int64_t prompt_tokens() const {
        size_t tokens = 0;
        for (const std::vector<int>& prompt : asked.prompts) tokens += prompt.size();
        return (int64_t)tokens;
    }
    nlohmann::ordered_json usage() const { return CompletionAnswer::usage(prompt_tokens(), written); }
};

}  // namespace detail

class ModelServer {
public:
    ModelServer(const InferenceRun& run, const ServeOptions& o)
        : o_(o),
          model_{o.served_model_name.empty() ? name_of(run.dir) : o.served_model_name,
                 *run.tokenizer,
                 o.seq_length ? std::min(o.seq_length, run.c.room()) : run.c.room(),
                 o.max_new_tokens,
                 adapted_texts(run.dir, run.tokenizer.get(), run.adapter).end_ids,
                 {},
                 ""} {
        try {
            model_.chat.emplace(*run.tokenizer, find_chat_template(*run.tokenizer, o.chat_template, run.adapter));
        } catch (const Error& e) {
            if (!o.chat_template.empty()) throw;
            model_.no_chat = e.what();
        }
        created_ = (int64_t)time(nullptr);
    }

    // Serves until a signal; returns after all requests are complete.
    template <class Generator>
    void run(Generator& generator) {
        set_up();
        const bool any = o_.port == 0;
        const int port = any ? http_.bind_to_any_port(o_.host) : http_.bind_to_port(o_.host, o_.port) ? o_.port : -1;
        if (port < 0)
            fail("cannot listen on %s, port %d; HINT: another --host or --port; --port 0 chooses a free one", o_.host.c_str(),
                 o_.port);
        listen(socket_,
               SOMAXCONN);  // the library's backlog is 5 connections; Linux resets some of more that arrive at once
        for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
            struct sigaction action = {};
            sigaction(signal, nullptr, &action);
            if (signal == SIGHUP && action.sa_handler == SIG_IGN) continue;  // by nohup
            action = {};
            action.sa_handler = [](int) { detail::asked_to_end = true; };
            sigaction(signal, &action, nullptr);
        }
        std::atomic<bool> listens{true};
        std::thread listener([&] {
            http_.serve();
            listens = false;
        });
        // Before it runs, stop() would have no effect.
        while (listens && !http_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        print_line(stdout, format("serving %s at http://%s:%d/ (API: /v1)", model_.name.c_str(), o_.host.c_str(), port));
        fflush(stdout);
        const std::exception_ptr problem = write(generator);
        http_.close();
        listener.join();  // after the responses being sent, or their time limit
        if (problem) std::rethrow_exception(problem);
        print_line(stdout, format("ended; %s in %s", counted(tokens_, "token").c_str(), counted(requests_, "request").c_str()));
    }

private:
    using Request = detail::ServedRequest;
    using Json = nlohmann::ordered_json;

    static std::string name_of(const std::string& dir) {
        const auto path = std::filesystem::canonical(dir);
        const std::string name = path.filename().string();
        return name.compare(0, 5, "step_") == 0 ? path.parent_path().filename().string() : name;
    }

    // ---- the model's thread ----
    // Returns an error, if any.
    template <class Generator>
    std::exception_ptr write(Generator& generator) {
        Decoder<Generator> decoder(generator, 1);  // one prompt per step: long prompts must not stall the running sequences
        std::exception_ptr problem;                // one request's error, which ends all
        try {
            write_until_the_end(decoder);
        } catch (...) {
            problem = std::current_exception();
            detail::asked_to_end = true;
        }
        while (decoder.step()) {
        }  // all are cancelled now, and end
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& request : queue_)
            for (Request::Choice& choice : request->choices) end(*request, choice, TextEnd::abandoned);
        queue_.clear();
        closed_ = true;
        return problem;
    }
    template <class Decoder>
    void write_until_the_end(Decoder& decoder) {
        while (!detail::asked_to_end) {
            const bool busy = decoder.step();
            tokens_ = decoder.tokens();
            std::unique_lock<std::mutex> lock(mutex_);
            // Signals only set a flag, so it is polled.
            if (!busy) arrived_.wait_for(lock, std::chrono::milliseconds(50), [&] { return !queue_.empty(); });
            for (; !queue_.empty(); queue_.pop_front()) add(decoder, queue_.front());
        }
    }

    template <class Decoder>
    void add(Decoder& decoder, const std::shared_ptr<Request>& request) {
        const CompletionRequest& asked = request->asked;
        const uint64_t seed = asked.seed ? *asked.seed : (uint64_t)created_ * 1000003 + (uint64_t)requests_;
        if (asked.json) list_tokens();
        for (size_t i = 0; i < request->choices.size(); i++) {
            TextRequest text = {asked.prompts[i / (size_t)asked.n], asked.max_new_tokens, asked.sampling, seed,
                                (uint32_t)(i % (size_t)asked.n),    model_.ends};
            if (asked.chat) text.ends.push_back(model_.chat->end_token());
            if (asked.logprobs >= 0) score(*request, i, text);
            text.emit = [this, request, i](int token) {
                const std::lock_guard<std::mutex> lock(request->mutex);
                request->begun = true;
                request->written++;
                Request::Choice& choice = request->choices[i];
                const bool stops = choice.text.add(model_.tokenizer.token_bytes(token));
                if (request->asked.json) choice.json.add(bytes_of_tokens_[(size_t)token]);
                request->changed.notify_all();
                return !stops && !choice.json.complete();
            };
            if (asked.json) text.allowed = [this, &json = request->choices[i].json](int token) { return keeps(json, token); };
            text.ended = [this, request, i](TextEnd how) { end(*request, request->choices[i], how); };
            text.wanted = [request] { return request->wanted(); };
            decoder.add(std::move(text));
        }
        requests_++;
    }
    // Whether the text is still the start of a JSON object with this token.
    bool keeps(JsonPrefix json, int token) const {
        if ((size_t)token >= bytes_of_tokens_.size()) return false;
        const std::string& bytes = bytes_of_tokens_[(size_t)token];
        return !bytes.empty() && json.add(bytes);
    }
    void list_tokens() {
        if (bytes_of_tokens_.empty())
            for (int i = 0; i < model_.tokenizer.vocab_size(); i++)
                bytes_of_tokens_.push_back(model_.tokenizer.is_special(i) ? std::string() : model_.tokenizer.token_bytes(i));
    }
    // Lets the decoder score the tokens of a text. An echoed prompt's tokens follow its first token one by one, as if they had
    // been sampled.
    void score(Request& request, size_t i, TextRequest& text) {
        Request::Choice& choice = request.choices[i];
        text.alternatives = request.asked.logprobs;
        text.scored = [&request, &choice](const TokenScore& s) {
            const std::lock_guard<std::mutex> lock(request.mutex);
            request.begun = true;
            choice.logprobs->add(s);
        };
        choice.logprobs.emplace(model_.tokenizer);
        if (!request.asked.echoes) return;
        choice.logprobs->add_first(text.prompt[0]);
        text.forced.assign(text.prompt.begin() + 1, text.prompt.end());
        text.prompt.resize(1);
    }
    void end(Request& request, Request::Choice& choice, TextEnd how) {
        texts_--;
        const std::lock_guard<std::mutex> lock(request.mutex);
        request.begun = request.begun || how != TextEnd::abandoned;
        choice.end = how == TextEnd::token || how == TextEnd::stopped ? "stop" : "length";
        choice.text.end();
        request.changed.notify_all();
    }

    // ---- the threads of the HTTP server ----
    // Rejects a number of threads that the system does not allow, for which the library would end the program.
    static void check_threads(size_t n) {
        std::promise<void> go;
        const std::shared_future<void> told = go.get_future().share();
        std::vector<std::thread> threads;
        std::string problem;
        try {
            while (threads.size() < n) threads.emplace_back([told] { told.wait(); });
        } catch (const std::system_error& e) {
            problem = format("only %zu of %zu threads, one per request, could be started: %s; HINT: a smaller --max-queue",
                             threads.size(), n, e.what());
        }
        go.set_value();
        for (std::thread& thread : threads) thread.join();
        if (!problem.empty()) fail("%s", problem.c_str());
    }

    void set_up() {
        // A thread per active or queued request, and some to reject more.
        const size_t threads = (size_t)(o_.batch + o_.max_queue) + 8;
        check_threads(threads);
        http_.set_threads(threads);
        http_.limits.request_seconds = o_.request_timeout;
        http_.refusal = [this](int status) {
            return json_text(ApiError{status, status == 408
                                                  ? "the request did not arrive within " + counted(o_.request_timeout, "second")
                                                  : format("the headers are above %zu bytes", http_.limits.head_bytes)}
                                 .json());
        };
        http_.set_payload_max_length((size_t)o_.max_body);
        http_.set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
            using Handled = httplib::Server::HandlerResponse;
            try {
                check_origin(request);
                return Handled::Unhandled;
            } catch (const ApiError& e) {
                HttpConnection::current()->close_after_answer();
                refuse(response, e);
                return Handled::Handled;
            }
        });
        http_.set_tcp_nodelay(true);
        http_.set_socket_options([this](socket_t socket) {
            socket_ = socket;
            // Uses only a port without another listener, except for old connections that are closing; the library's default
            // options let two servers share a port, whose requests go to either.
            const int yes = 1;
            setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        });
        http_.Get("/", [](const httplib::Request&, httplib::Response& response) {
            // Only the page's own scripts and styles; it only queries this server, and no page may frame it.
            response.set_header(
                "Content-Security-Policy",
                "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
            response.set_header("X-Content-Type-Options", "nosniff");
            response.set_header("Referrer-Policy", "no-referrer");
            response.set_content(serve_page, "text/html; charset=utf-8");
        });
        http_.Get("/health", [](const httplib::Request&, httplib::Response& response) {
            respond(response, {{"status", "ok"}});
        });
        http_.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
            respond(response, {{"object", "list"}, {"data", Json::array({model_object()})}});
        });
        http_.Get(R"(/v1/models/(.+))", [this](const httplib::Request& request, httplib::Response& response) {
            if (request.matches[1] == model_.name) return respond(response, model_object());
            refuse(response,
                   {404, "the model does not exist; this server has '" + model_.name + "'", "model", "model_not_found"});
        });
        for (const bool chat : {false, true})
            http_.Post(chat ? "/v1/chat/completions" : "/v1/completions",
                       with_body([this, chat](const std::string& body, httplib::Response& response) {
                           complete(body, chat, response);
                       }));
        // Bodies of requests to unknown paths, which the library would otherwise keep.
        const auto not_here = with_body([](const std::string&, httplib::Response& response) { response.status = 404; });
        http_.Post(".*", not_here).Put(".*", not_here).Patch(".*", not_here).Delete(".*", not_here);
        http_.set_error_handler([this](const httplib::Request& request, httplib::Response& response) {
            if (!response.body.empty()) return;
            refuse(response, {response.status, response.status == 413 ? too_large()
                                               : response.status == 404
                                                   ? "there is no page at " + printable(request.method + " " + request.path)
                                                   : "the request is not valid HTTP"});
        });
        http_.set_exception_handler([](const httplib::Request&, httplib::Response& response, const std::exception_ptr&) {
            refuse(response, {500, "an internal error"});
        });
    }

    // Rejects requests that a web page of another site makes a browser send: through a name that resolves to this machine (DNS
    // rebinding: Host is the page's own name), or across sites (Origin is the page's name).
    void check_origin(const httplib::Request& request) const {
        if (request.get_header_value_count("Host") > 1) throw ApiError{400, "the request has several Host headers"};
        const std::string host = lower_ascii(request.get_header_value("Host"));
        if (!host.empty() && !known_host(without_port(host)))
            throw ApiError{403,
                           format("this server does not answer to the host '%s'; HINT: train_gpt serve --allowed-hosts %s",
                                  printable(host.substr(0, 200)).c_str(), printable(without_port(host).substr(0, 200)).c_str()),
                           "", "forbidden_host"};
        if (!request.has_header("Origin")) return;
        const std::string origin = lower_ascii(request.get_header_value("Origin"));
        const size_t scheme = origin.find("://");
        const std::string from = scheme == std::string::npos ? "" : origin.substr(scheme + 3);
        const bool same = !from.empty() && from == host;
        if (!same && (from.empty() || !allowed(without_port(from))))
            throw ApiError{
                403,
                format("this server does not answer pages of '%s'; HINT: train_gpt serve --allowed-hosts NAME, with the "
                       "page's host",
                       printable(origin.substr(0, 200)).c_str()),
                "", "forbidden_origin"};
    }
    // "name:80" -> "name", "[::1]:80" -> "::1"
    static std::string without_port(const std::string& host) {
        if (host[0] == '[') return host.substr(1, host.find(']') - 1);
        return host.substr(0, host.find(':'));
    }
    bool allowed(const std::string& host) const {
        return std::any_of(o_.allowed_hosts.begin(), o_.allowed_hosts.end(),
                           [&](const std::string& name) { return name == "*" || lower_ascii(name) == host; });
    }
    // Addresses, localhost and this machine's name: no other site can have them.
    bool known_host(const std::string& host) const {
        unsigned char address[sizeof(struct in6_addr)];
        if (inet_pton(AF_INET, host.c_str(), address) == 1 || inet_pton(AF_INET6, host.c_str(), address) == 1) return true;
        char own[256] = "";
        gethostname(own, sizeof own - 1);
        const std::string name = lower_ascii(own), suffix = ".localhost";
        const bool below = host.size() > suffix.size() && ends_with(host, suffix);
        return host == "localhost" || below || host == lower_ascii(o_.host) || (!name.empty() && host == name) || allowed(host);
    }

    // A handler of requests with bodies: answer(body, response), which may throw an ApiError.
    template <class Answer>
    httplib::Server::HandlerWithContentReader with_body(Answer answer) {
        return
            [this, answer](const httplib::Request& request, httplib::Response& response, const httplib::ContentReader& read) {
                try {
                    answer(read_body(request, response, read), response);
                } catch (const ApiError& e) {
                    if (e.status == 413 || e.status == 415) HttpConnection::current()->close_after_answer();
                    refuse(response, e);
                }
            };
    }
    // The body of a request. The library's own limits apply to the length that a client declares, which chunked or compressed
    // requests need not do, and are 8 KiB for the type that curl -d declares. The excess of a too large body is discarded.
    std::string read_body(const httplib::Request& request, const httplib::Response& response,
                          const httplib::ContentReader& read) const {
        // Browsers let pages of other sites send some other types without asking the server first.
        const std::string type = lower_ascii(request.get_header_value("Content-Type"));
        if (type.substr(0, type.find_first_of("; ")) != "application/json")
            throw ApiError{415,
                           format("the body's type is '%s'; it must be JSON, with the header 'Content-Type: application/json'",
                                  printable(type.substr(0, 100)).c_str())};
        std::string body;
        bool fits = true;
        const bool whole = read([&](const char* data, size_t n) {
            fits = fits && body.size() + n <= (size_t)o_.max_body;
            if (fits) body.append(data, n);
            return true;
        });
        if (!fits || response.status == 413) throw ApiError{413, too_large()};
        if (!whole) throw ApiError{400, "the request is not valid HTTP"};
        return body;
    }
    std::string too_large() const { return format("the body is above %lld bytes", (long long)o_.max_body); }

    static void respond(httplib::Response& response, const Json& j) { response.set_content(json_text(j), "application/json"); }
    static void refuse(httplib::Response& response, const ApiError& e) {
        response.status = e.status;
        if (e.status == 503) response.set_header("Retry-After", "1");
        respond(response, e.json());
    }
    Json model_object() const {
        return {{"id", model_.name},
                {"object", "model"},
                {"created", created_},
                {"owned_by", "train_gpt"},
                {"context", model_.room},
                {"max_new_tokens", model_.max_new_tokens},
                {"chat", model_.chat.has_value()}};
    }

    void complete(const std::string& body, bool chat, httplib::Response& response) {
        auto request = std::make_shared<Request>();
        request->asked = read_completion_request(body, chat, model_);
        request->answer = {
            format("%s-%llx%04llx", chat ? "chatcmpl" : "cmpl", (unsigned long long)created_, (unsigned long long)ids_++),
            model_.name, (int64_t)time(nullptr), chat};
        for (int i = 0; i < request->asked.choices(); i++) {
            request->choices.push_back({StoppingText(request->asked.stops), "", {}, {}, false, false});
            if (!request->asked.echoes) continue;
            for (const int token : request->asked.prompts[(size_t)i / (size_t)request->asked.n])
                request->choices.back().text.add(model_.tokenizer.token_bytes(token));
        }
        request->deadline = detail::ServeClock::now() + std::chrono::seconds(o_.timeout);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (closed_ || detail::asked_to_end) throw ApiError{503, "the server is shutting down"};
            // A single request may exceed this limit if there are no others.
            const int most = o_.batch + o_.max_queue, asked = (int)request->choices.size();
            if (texts_ > 0 && texts_ + asked > most)
                throw ApiError{503,
                               format("%d completions are running or queued; %d more would exceed %d; try again later",
                                      texts_.load(), asked, most),
                               "", "overloaded"};
            texts_ += asked;
            queue_.push_back(request);
        }
        arrived_.notify_one();
        // Until the first token, an error can still be returned as an error response.
        std::unique_lock<std::mutex> lock(request->mutex);
        const HttpConnection& client = *HttpConnection::current();
        while (!request->changed.wait_for(lock, std::chrono::milliseconds(100),
                                          [&] { return request->begun || ended(*request); })) {
            if (client.alive()) continue;
            request->gone = true;
            throw ApiError{503, "the client has gone"};
        }
        if (!request->begun)
            throw ApiError{503,
                           detail::asked_to_end ? "the server is shutting down"
                                                : format("generation has not started within %d seconds", o_.timeout),
                           "", "timeout"};
        lock.unlock();
        const bool streams = request->asked.streams;
        response.set_chunked_content_provider(
            streams ? "text/event-stream" : "application/json",
            [request, streams](size_t, httplib::DataSink& sink) { return send(*request, streams, sink); },
            [request](bool) { request->gone = true; });
        response.set_header("Cache-Control", "no-cache");
    }

    static bool ended(const Request& request) {
        return std::all_of(request.choices.begin(), request.choices.end(),
                           [](const auto& choice) { return !choice.end.empty(); });
    }

    // Sends available data; waits for it a while. Returns false if the client has disconnected.
    static bool send(Request& request, bool streams, httplib::DataSink& sink) {
        if (!sink.is_writable()) return false;
        std::unique_lock<std::mutex> lock(request.mutex);
        std::string out;
        const auto collect = [&] {
            out = streams ? events(request) : ended(request) ? whole(request) : "";
            return !out.empty();
        };
        if (!request.changed.wait_for(lock, std::chrono::milliseconds(100), collect)) return true;
        const bool last = ended(request);
        lock.unlock();
        if (!sink.write(out.data(), out.size())) return false;
        if (last) sink.done();
        return true;
    }

    static std::string whole(Request& request) {
        Json choices = Json::array();
        for (size_t i = 0; i < request.choices.size(); i++) {
            Request::Choice& choice = request.choices[i];
            choices.push_back(request.answer.choice((int)i, choice.text.take(), choice.end));
            if (choice.logprobs) choices.back()["logprobs"] = choice.logprobs->json();
        }
        return json_text(request.answer.object(false, std::move(choices), request.usage()));
    }

    // The server-sent events since the last call.
    static std::string events(Request& request) {
        std::string out;
        const auto send_part = [&](Json choices, const Json& usage) {
            out += "data: " + json_text(request.answer.object(true, std::move(choices), usage)) + "\n\n";
        };
        for (size_t i = 0; i < request.choices.size(); i++) {
            Request::Choice& choice = request.choices[i];
            const std::string text = choice.text.take();
            if (choice.told || (text.empty() && choice.end.empty())) continue;
            send_part(Json::array({request.answer.part((int)i, text, !choice.begun, choice.end)}), nullptr);
            choice.begun = true;
            choice.told = !choice.end.empty();
        }
        if (!ended(request)) return out;
        if (request.asked.reports_usage) send_part(Json::array(), request.usage());
        return out + "data: [DONE]\n\n";
    }

    const ServeOptions& o_;
    ServedModel model_;
    Strings bytes_of_tokens_;  // empty for special ones; filled by the first request for JSON
    int64_t created_ = 0;
    socket_t socket_ = INVALID_SOCKET;  // the listening socket
    HttpServer http_;
    std::atomic<int> texts_{0};  // active or queued
    std::atomic<int64_t> tokens_{0}, requests_{0}, ids_{0};
    std::mutex mutex_;  // protects the members below
    std::condition_variable arrived_;
    std::deque<std::shared_ptr<Request>> queue_;
    bool closed_ = false;
};

#else

inline void check_serving() {
    fail("this program was built without an HTTP server; HINT: install Debian's package libcpp-httplib-dev, and build again");
}
struct ModelServer {  // never reached: check_serving() fails first
    template <class Run, class Options>
    ModelServer(const Run&, const Options&) {}
    template <class Generator>
    void run(Generator&) {}
};
#endif
