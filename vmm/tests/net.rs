//! The network card against a driver that behaves, and one that does not.
mod net {
    mod control;
    #[allow(dead_code)]
    pub(crate) mod driver;
    mod hostile;
    mod measure;
    mod tap;
    mod traffic;
}
