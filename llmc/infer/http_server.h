// An HTTP server on cpp-httplib with bounds on the cost of each client. The library itself limits only each recv(), so that a
// client that sends one byte now and then occupies a thread forever, with headers of any size. Here each connection is a Stream
// of our own, which limits the total time of a request, the size of its headers, and the time that a response waits for a slow
// reader. When all threads are busy, the connections that wait for their clients are closed for new ones.
#pragma once
#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<httplib.h>)
// As Debian's library was compiled: Request has other members without it.
#define CPPHTTPLIB_OPENSSL_SUPPORT
#include <httplib.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

struct HttpLimits {
    int request_seconds = 30;      // for a request to arrive, and for the reader of an answer; one more per MiB
    int closing_seconds = 5;       // for answers, after the server was asked to end
    size_t head_bytes = 32 << 10;  // of request line and headers, and of a line between the parts of a body
    int patience_seconds = 1;      // after which a connection that waits for its client may make room for another
};

// A client's connection. The thread that serves it reads and writes; others may only query its wait, and shut it down.
// The functions of a Stream differ between versions of the library, so none of them says `override`.
// NOLINTBEGIN(modernize-use-override)
class HttpConnection : public httplib::Stream {
public:
    using Clock = std::chrono::steady_clock;
    enum Waits { on_server, for_request, for_rest, for_reader };  // in the order in which they make room, from the second on

    HttpConnection(socket_t fd, const HttpLimits& limits) : fd_(fd), limits_(limits) { current() = this; }
    ~HttpConnection() { current() = nullptr; }
    HttpConnection(const HttpConnection&) = delete;
    HttpConnection& operator=(const HttpConnection&) = delete;

    // The connection that this thread serves.
    static HttpConnection*& current() {
        static thread_local HttpConnection* connection = nullptr;
        return connection;
    }

    // ---- the serving thread ----
    // Waits for the first byte of the next request. False: none comes.
    bool await_request(int seconds) {
        if (at_ < end_) return true;
        const bool came = wait(POLLIN, for_request, Clock::now(), seconds);
        return came && fill();
    }
    void begin_request() {
        begun_ = Clock::now();
        received_ = sent_ = head_ = line_ = 0;
        blocked_ = {};
        in_head_ = true;
    }
    void end_head() { in_head_ = false; }
    // No further request is read: the unread part of this one's body would be parsed as one.
    void close_after_answer() { last_ = true; }
    bool last() const { return last_ || refused_; }
    // 408, 431: why the request was not read to its end, if nothing was answered yet; otherwise 0.
    int refused() const { return sent_ ? 0 : refused_; }
    // Whether the client is still there.
    bool alive() const {
        if (at_ < end_) return true;
        char byte;
        const ssize_t n = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
    }
    void send_raw(const std::string& text) {
        refused_ = 0;
        write(text.data(), text.size());
    }
    // Closed with unread bytes, a socket would be reset, and the client might not see the answer.
    void close() {
        ::shutdown(fd_, SHUT_WR);
        const Clock::time_point end = Clock::now() + std::chrono::seconds(1);
        char rest[4096];
        if (last_ || refused_)
            while (Clock::now() < end && poll_for(POLLIN, end) && recv(fd_, rest, sizeof rest, MSG_DONTWAIT) > 0) {
            }
        ::close(fd_);
    }

    // ---- other threads ----
    Waits waits() const { return waits_; }
    double seconds() const { return std::chrono::duration<double>(Clock::now() - Clock::time_point(since_.load())).count(); }
    bool shut() const { return shut_; }
    void shut_down() {
        shut_ = true;
        ::shutdown(fd_, SHUT_RDWR);
    }

    // ---- as a Stream ----
    ssize_t read(char* data, size_t size) {
        if (refused_ || (at_ == end_ && !fill())) return refused_ ? -1 : 0;
        const size_t n = std::min(size, end_ - at_);
        std::copy_n(buffer_ + at_, n, data);
        at_ += n;
        // The library reads lines byte by byte, and keeps them whatever their length.
        if (in_head_) head_ += n;
        line_ = n > 1 || *data == '\n' ? 0 : line_ + 1;
        if (head_ > limits_.head_bytes || line_ > limits_.head_bytes) return refuse(431);
        return (ssize_t)n;
    }
    ssize_t write(const char* data, size_t size) {
        if (refused_) return (ssize_t)size;  // the library's answer to half a request
        for (size_t at = 0; at < size;) {
            const ssize_t n = send(fd_, data + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n > 0) {
                at += (size_t)n;
                sent_ += (size_t)n;
            } else if (n < 0 && errno != EAGAIN && errno != EINTR) return -1;
            else {
                const Clock::time_point start = Clock::now();
                if (!wait(POLLOUT, for_reader, start, seconds_for(sent_) - blocked_.count())) return -1;
                blocked_ += Clock::now() - start;
            }
        }
        return (ssize_t)size;
    }
    bool is_readable() const { return at_ < end_ || poll_for(POLLIN, Clock::now()); }
    bool is_writable() const { return poll_for(POLLOUT, Clock::now() + std::chrono::seconds(10)) && alive(); }
    bool wait_readable() const { return is_readable(); }
    bool wait_writable() const { return is_writable(); }
    time_t duration() const { return 0; }
    void get_remote_ip_and_port(std::string& ip, int& port) const { address(getpeername, ip, port); }
    void get_local_ip_and_port(std::string& ip, int& port) const { address(getsockname, ip, port); }
    socket_t socket() const { return fd_; }

private:
    double seconds_for(size_t bytes) const { return limits_.request_seconds + (double)bytes / (1 << 20); }
    int refuse(int status) {
        refused_ = status;
        return -1;
    }
    bool fill() {
        if (!wait(POLLIN, for_rest, begun_, seconds_for(received_))) {
            refuse(408);
            return false;
        }
        const ssize_t n = recv(fd_, buffer_, sizeof buffer_, 0);
        at_ = 0;
        end_ = n > 0 ? (size_t)n : 0;
        received_ += end_;
        return n > 0;
    }
    bool poll_for(short events, Clock::time_point until) const {
        for (;;) {
            const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
            struct pollfd p = {fd_, events, 0};
            const int n = poll(&p, 1, (int)std::clamp<int64_t>(left + 1, 0, 1 << 30));
            if (n > 0) return true;
            if (n < 0 && errno != EINTR) return false;
            if (Clock::now() >= until) return false;
        }
    }
    // Until `seconds` after `since`.
    bool wait(short events, Waits what, Clock::time_point since, double seconds) {
        since_ = since.time_since_epoch();
        waits_ = what;
        const bool came =
            poll_for(events, since + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
        waits_ = on_server;
        return came;
    }
    template <class Name>
    void address(Name name, std::string& ip, int& port) const {
        struct sockaddr_storage storage;
        socklen_t size = sizeof storage;
        char host[NI_MAXHOST], service[NI_MAXSERV];
        auto* const a = reinterpret_cast<struct sockaddr*>(&storage);
        if (name(fd_, a, &size)) return;
        if (getnameinfo(a, size, host, sizeof host, service, sizeof service, NI_NUMERICHOST | NI_NUMERICSERV)) return;
        ip = host;
        port = atoi(service);
    }

    const socket_t fd_;
    const HttpLimits& limits_;
    char buffer_[4096];
    size_t at_ = 0, end_ = 0;                               // the unread part of the buffer
    size_t received_ = 0, sent_ = 0, head_ = 0, line_ = 0;  // bytes of this request and its answer
    bool in_head_ = true, last_ = false;
    int refused_ = 0;
    Clock::time_point begun_ = Clock::now();
    std::chrono::duration<double> blocked_{};  // by the reader of the answer
    std::atomic<bool> shut_{false};
    std::atomic<Waits> waits_{on_server};
    std::atomic<Clock::duration> since_{Clock::duration::zero()};
};
// NOLINTEND(modernize-use-override)

class HttpServer : public httplib::Server {
public:
    HttpLimits limits;
    std::function<std::string(int status)> refusal = [](int) { return std::string(); };  // the body of 408 and 431

    // Before it listens.
    void set_threads(size_t n) {
        threads_ = n;
        new_task_queue = [this, n] { return new Pool(*this, n); };
    }
    // As listen_after_bind(), with a thread that watches the connections.
    void serve() {
        std::thread watch([this] { keep_watch(); });
        listen_after_bind();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ended_ = true;
        }
        changed_.notify_all();
        watch.join();
    }
    // No further requests; those in hand have closing_seconds to end.
    void close() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
            closes_ = HttpConnection::Clock::now() + std::chrono::seconds(limits.closing_seconds);
            for (HttpConnection* c : connections_)
                if (c->waits() == HttpConnection::for_request) c->shut_down();
        }
        changed_.notify_all();
        stop();
    }

private:
    // The library's pool of threads, with a count of connections that wait for one.
    class Pool : public httplib::TaskQueue {
    public:
        Pool(HttpServer& server, size_t n) : server_(server), threads_(n) {}
        // Returns nothing, or true, as the version of the library has it.
        auto enqueue(std::function<void()> job) -> decltype(std::declval<httplib::TaskQueue&>().enqueue(job)) override {
            server_.waiting_++;
            return threads_.enqueue(std::move(job));
        }
        void shutdown() override { threads_.shutdown(); }

    private:
        HttpServer& server_;
        httplib::ThreadPool threads_;
    };

    bool process_and_close_socket(socket_t fd) override {
        waiting_--;
        HttpConnection connection(fd, limits);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            connections_.insert(&connection);
        }
        serve_requests(connection);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            connections_.erase(&connection);
        }
        connection.close();
        return true;
    }
    void serve_requests(HttpConnection& connection) {
        for (size_t left = keep_alive_max_count_; left > 0 && !closing_; left--) {
            if (!connection.await_request((int)keep_alive_timeout_sec_)) return;
            connection.begin_request();
            bool closed = false;
            const bool served = process(&HttpServer::process_request, connection, left == 1, closed);
            if (const int status = connection.refused()) {
                const std::string body = refusal(status);
                connection.send_raw("HTTP/1.1 " + std::to_string(status) +
                                    (status == 408 ? " Request Timeout" : " Request Header Fields Too Large") +
                                    "\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: " +
                                    std::to_string(body.size()) + "\r\n\r\n" + body);
                return connection.close_after_answer();
            }
            if (!served || closed || connection.last()) return;
        }
    }
    static void end_head(httplib::Request& request) {
        HttpConnection::current()->end_head();
        request.ranges.clear();  // many ranges of one page would be an answer of any size; each may be ignored
        request.headers.erase("Range");
    }
    // The library's function before and after version 0.18.
    using Setup = std::function<void(httplib::Request&)>;
    bool process(bool (httplib::Server::*f)(httplib::Stream&, bool, bool&, const Setup&), HttpConnection& c, bool last,
                 bool& closed) {
        return (this->*f)(c, last, closed, end_head);
    }
    bool process(bool (httplib::Server::*f)(httplib::Stream&, const std::string&, int, const std::string&, int, bool, bool&,
                                            const Setup&),
                 HttpConnection& c, bool last, bool& closed) {
        std::string remote, local;
        int remote_port = 0, local_port = 0;
        c.get_remote_ip_and_port(remote, remote_port);
        c.get_local_ip_and_port(local, local_port);
        return (this->*f)(c, remote, remote_port, local, local_port, last, closed, end_head);
    }

    void keep_watch() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!ended_) {
            changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return ended_; });
            if (closing_ && HttpConnection::Clock::now() >= closes_)
                for (HttpConnection* c : connections_) c->shut_down();
            for (int i = waiting_; i > 0 && connections_.size() >= threads_; i--)
                if (!make_room()) break;
        }
    }
    // Shuts down the connection that has kept its thread waiting for longest; `mutex_` is held.
    bool make_room() {
        HttpConnection* longest = nullptr;
        const auto key = [](const HttpConnection& c) { return std::make_pair(-(int)c.waits(), c.seconds()); };
        for (HttpConnection* c : connections_)
            if (c->waits() != HttpConnection::on_server && c->seconds() >= limits.patience_seconds && !c->shut() &&
                (!longest || key(*c) > key(*longest)))
                longest = c;
        if (longest) longest->shut_down();
        return longest;
    }

    size_t threads_ = 0;
    std::atomic<int> waiting_{0};  // connections without a thread
    std::atomic<bool> closing_{false};
    std::mutex mutex_;  // of the rest
    std::condition_variable changed_;
    std::set<HttpConnection*> connections_;
    HttpConnection::Clock::time_point closes_{};
    bool ended_ = false;
};
#endif
