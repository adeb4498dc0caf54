"""Passes: functions from one worker's list to another, that put actions into it."""
