//! `races`.
