//! `status`.
