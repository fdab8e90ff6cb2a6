//! The network card.
