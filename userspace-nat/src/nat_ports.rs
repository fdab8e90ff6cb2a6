//! Translated ports.
