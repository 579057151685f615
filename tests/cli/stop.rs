//! `stop`.
