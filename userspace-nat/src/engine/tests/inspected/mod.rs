//! Inspected connections.
mod ends;
mod limits;
mod names;
mod past;
mod quic;
mod scene;
mod stream;
