#!/usr/bin/env python3
"""Serves the files of a folder over HTTP, badly in a way that the first part of the path names, until its input ends.

  address_server.py FOLDER PORT_FILE

whole   as it should be           drops    each connection breaks off after 50,000 bytes
blind   drops, without ranges     busy     two requests of three get status 503
other   drops, then other bytes   dies     breaks off in the middle, then 404 until FOLDER/alive exists
silent  a header and nothing
"""
import http.server
import os
import socket
import sys
import threading
import time
import urllib.parse

folder, port_file = sys.argv[1:]
requests = {}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def refuse(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        way, _, name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path[1:]).partition("/")
        requests[self.path] = n = requests.get(self.path, 0) + 1
        try:
            with open(os.path.join(folder, name), "rb") as file:
                content = file.read()
        except OSError:
            return self.refuse(404)
        if way == "busy" and n % 3:
            return self.refuse(503)
        if way == "dies" and n > 1 and not os.path.exists(os.path.join(folder, "alive")):
            return self.refuse(404)
        if way == "other" and n > 1:
            content = content[::-1]
        begin = 0
        given = self.headers.get("Range")
        if given and way != "blind":
            begin = int(given[len("bytes="):].split("-")[0])
            if begin >= len(content):
                return self.refuse(416)
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        end = len(content)
        if way in ("drops", "other"):
            end = begin + 50000
        if way == "blind":
            end = 50000 * n
        if way == "dies" and not os.path.exists(os.path.join(folder, "alive")):
            end = len(content) // 2
        if way == "silent":
            time.sleep(1000)
        self.wfile.write(content[begin:end])
        if end < len(content):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
with open(port_file + ".new", "w", encoding="ascii") as out:
    out.write(str(server.server_address[1]))
os.rename(port_file + ".new", port_file)
sys.stdin.read()
