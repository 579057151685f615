//! `directories`.
