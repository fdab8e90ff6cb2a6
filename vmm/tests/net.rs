//! The network card with a correct driver and with a hostile one.
mod net {
    mod control;
    #[allow(dead_code)]
    pub(crate) mod driver;
    mod hostile;
    mod limits;
    mod measure;
    mod tap;
    mod traffic;
    mod vhost;
}
