//! wire/memcache
