//! Errors of the server and their exit codes.
