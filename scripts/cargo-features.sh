#!/usr/bin/env bash
# Prints the extra cargo features this machine needs: without OpenSSL's headers, OpenSSL is built
# from source.
set -euo pipefail
if [ -e /usr/include/openssl/ssl.h ] || pkg-config --exists openssl 2>/dev/null; then
    echo "worker"
else
    echo "worker,vendored-tls"
fi
