//! An in-memory datapath and port.
