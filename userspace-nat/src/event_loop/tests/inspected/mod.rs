//! Tests of connections that an inspect rule admits.
mod again;
mod early;
mod effort;
mod ends;
mod forged;
mod limits;
mod names;
mod past;
mod quic;
mod scene;
mod stream;
mod unsaid;
