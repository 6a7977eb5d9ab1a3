"""Engines that run machines. ``protocol`` says what each promises; one file per engine."""
