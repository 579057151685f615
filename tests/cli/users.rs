//! `users`.
