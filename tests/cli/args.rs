//! `args`.
