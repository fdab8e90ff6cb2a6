//! The engine over the in-memory kernel.
mod admission;
mod ends;
mod errors;
mod filtering;
mod properties;
mod rig;
mod speed;
mod survival;
