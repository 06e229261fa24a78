// Progress of long work: of a job with a count, and of a phase with a name.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "clock.h"
#include "terminal.h"

// Progress of one long job. On a terminal it is one line, rewritten at most ten times a second; elsewhere a plain line now and
// then (none for short jobs). finish() leaves a one-line summary. A job that fails leaves its line and a newline, so that the
// error starts a new line. The unit "B" counts bytes. For one thread only.
class Progress {
public:
    // total = 0: not known
    Progress(const std::string& label, int64_t total, std::string unit, FILE* out = stderr)
        : label_(printable(label)),
          unit_(std::move(unit)),
          total_(total),
          out_(out),
          line_(out),
          terminal_(is_terminal(out)),
          paint_(Paint::for_terminal(terminal_)),
          start_(monotonic_seconds()),
          shown_at_(start_) {}
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    ~Progress() { line_.keep(); }

    void update(int64_t done) {
        done_ = done;
        if (is_quiet()) return;
        const double now = monotonic_seconds(), since = now - shown_at_;
        if (terminal_) {
            if (drawn_ && since < 0.1) return;
            draw(now - start_);
            drawn_ = true;
        } else {
            // at every tenth of the total or every minute, but never twice in ten seconds
            const bool tenth = total_ > 0 && done - shown_ >= total_ / 10;
            if (since < 10 || (!tenth && since < 60)) return;
            fprintf(out_, "%s: %s\n", label_.c_str(), plain(now - start_).c_str());
            fflush(out_);
        }
        shown_at_ = now;
        shown_ = done;
    }

    void finish() {
        if (is_quiet()) return;
        const double seconds = monotonic_seconds() - start_;
        line_.clear();
        fprintf(out_, "%s: %s in %s%s\n", label_.c_str(), amount((double)done_).c_str(), human_duration(seconds).c_str(),
                seconds >= 0.1 ? paint_.dim(" (" + amount(done_ / seconds) + "/s)").c_str() : "");
        fflush(out_);
    }

private:
    std::string amount(double n) const { return unit_ == "B" ? human_bytes(n) : human_count(n) + " " + unit_; }
    std::string eta(double elapsed) const {
        return done_ > 0 && elapsed > 0.5 ? "ETA " + human_duration(elapsed * (total_ - done_) / done_) : "";
    }
    double fraction() const { return std::clamp((double)done_ / total_, 0.0, 1.0); }

    std::string plain(double elapsed) const {
        const std::string rate = amount(done_ / elapsed) + "/s";
        if (total_ <= 0) return amount((double)done_) + ", " + rate;
        return format("%.0f%% (%s of %s), %s, %s", 100 * fraction(), amount((double)done_).c_str(),
                      amount((double)total_).c_str(), rate.c_str(), eta(elapsed).c_str());
    }

    void draw(double elapsed) {
        const std::string rate = elapsed > 0.1 ? amount(done_ / elapsed) + "/s" : "";
        std::string bar, text;
        if (total_ > 0) {
            const int cells = 24, full = (int)(fraction() * cells);
            const bool utf8 = utf8_locale();
            std::string done, rest;
            for (int i = 0; i < cells; i++) (i < full ? done : rest) += i < full ? (utf8 ? "━" : "#") : (utf8 ? "─" : "-");
            bar = paint_.accent(done) + paint_.dim(rest);
            text = format(" %3.0f%%  %s / %s  %s  %s", 100 * fraction(), amount((double)done_).c_str(),
                          amount((double)total_).c_str(), rate.c_str(), eta(elapsed).c_str());
            if (display_width(label_ + text) + 2 + cells >= terminal_width(out_)) bar.clear();
        } else {
            text = amount((double)done_) + "  " + rate;
        }
        if (bar.empty()) line_.show(cut_text(label_ + "  " + text, terminal_width(out_) - 1));
        else line_.show(label_ + "  " + bar + text);
    }

    std::string label_, unit_;
    int64_t total_, done_ = 0, shown_ = 0;  // done, and done when last shown
    FILE* out_;
    StatusLine line_;
    bool terminal_, drawn_ = false;
    Paint paint_;
    double start_, shown_at_;
};

// Names the current phase of the work, such as loading a model. On a terminal: one line with the elapsed seconds, removed at
// the end; elsewhere: a plain line after one second and then one a minute. A short phase prints nothing.
class PhaseStatus {
public:
    // patience: seconds before the first line
    explicit PhaseStatus(FILE* out = stderr, double patience = 1) : out_(out), patience_(patience), line_(out) {}
    PhaseStatus(const PhaseStatus&) = delete;
    PhaseStatus& operator=(const PhaseStatus&) = delete;
    ~PhaseStatus() {
        set("", true);
        if (ticker_.joinable()) ticker_.join();
    }
    void begin(const std::string& what) {
        set(printable(what), false);
        try {
            if (!ticker_.joinable()) ticker_ = std::thread([this] { tick(); });
        } catch (const std::system_error&) {  // no more threads
        }
    }
    void done() { set("", false); }

private:
    void set(const std::string& what, bool over) {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            what_ = what;
            over_ = over;
            start_ = monotonic_seconds();
            next_ = start_ + patience_;
            line_.clear();
        }
        changed_.notify_all();
    }
    void tick() {
        const Paint paint = Paint::for_terminal(terminal_);
        std::unique_lock<std::mutex> guard(mutex_);
        while (!over_) {
            if (what_.empty()) {
                changed_.wait(guard);
                continue;
            }
            const double now = monotonic_seconds();
            if (now < next_) {
                changed_.wait_for(guard, std::chrono::duration<double>(next_ - now));
                continue;
            }
            next_ = now + (terminal_ ? 1 : 60);
            const std::string text = what_ + (now - start_ < 2 ? " ..." : " ... " + human_duration(now - start_));
            if (terminal_) line_.show(paint.dim(cut_text(text, terminal_width(out_) - 1)));
            else {
                fprintf(out_, "%s\n", text.c_str());
                fflush(out_);
            }
        }
    }

    FILE* out_;
    double patience_;
    bool terminal_ = is_terminal(out_);
    StatusLine line_;
    std::mutex mutex_;  // guards all members below
    std::condition_variable changed_;
    std::string what_;
    bool over_ = false;
    double start_ = 0, next_ = 0;
    std::thread ticker_;
};
