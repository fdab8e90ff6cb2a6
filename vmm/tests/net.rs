//! The network card against a driver that behaves, and one that does not.
mod net {
    #[allow(dead_code)]
    pub mod driver;
    mod traffic;
}
