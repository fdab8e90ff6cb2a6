//! Admission of new flows.
