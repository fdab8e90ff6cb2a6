//! QUIC.
